"""A coordinator with tiny pools around the toy model, and a driver that runs requests step by step."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path

import numpy as np

from edgellm._core.page_table import KVPageTable
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances
from edgellm.cache.coordinator import ContextCacheCoordinator
from edgellm.cache.types import (
    BlockKeyExtras,
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeploymentConfig,
    Hash128,
)
from edgellm.plugins import load_plugins
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.device import CpuDevice
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import recount
from edgellm.testing.toy import ToyExecutor

OK = ContextCacheCoordinatorStatus.OK
HEADROOM = DecodingKvHeadroom(base_extra_tokens=1)
VOCAB = 97


PLUGIN_MODULES = {
    "edgellm-eagle": "edgellm_eagle.policy",
    "edgellm-hybrid": "edgellm_hybrid.policy",
    "edgellm-shared-kv": "edgellm_shared_kv.policy",
}


@cache
def all_policies():
    """The built-in policies and those of the plugins beside this checkout, installed or not."""
    plugins = Path(__file__).parents[2] / "plugins"
    extra = []
    for distribution, module in PLUGIN_MODULES.items():
        source = str(plugins / distribution / "src")
        if source not in sys.path:
            sys.path.append(source)
        extra.append((distribution, importlib.import_module(module)))
    return tuple(load_plugins(autoload=False, extra=extra).policies)


class FlakySynchronizer:
    """A stream wait that can be told to fail; counts its calls."""

    def __init__(self):
        self.failing = False
        self.raises = False
        self.calls = 0

    def __call__(self, stream):
        assert stream is not None, "a wait for no stream"
        self.calls += 1
        if self.failing and self.raises:
            raise (OSError if self.raises is True else self.raises)("device lost")
        return not self.failing


class RecordingMirror:
    """A device page table that remembers which rows were uploaded, and can fail."""

    def __init__(self):
        self.uploads = []
        self.failures = 0

    def upload_rows(self, rows, slots):
        if self.failures:
            self.failures -= 1
            raise OSError("upload failed")
        self.uploads.append(list(slots))


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return round(self.seconds * 1e9)


class Rig:
    def __init__(self, *, page_size=4, num_pages=16, batch=4, capacity=32, policies=None, profile=None, **config):
        self.page_size = page_size
        self.deployment = DeploymentConfig(
            max_batch_size=batch,
            max_input_length=capacity,
            max_kv_capacity=capacity,
            page_size=page_size,
            num_pages=num_pages,
        )
        self.table = KVPageTable(batch, self.deployment.pages_per_slot, num_pages)
        self.device = CpuDevice()
        self.sync = FlakySynchronizer()
        self.mirror = RecordingMirror()
        self.clock = Clock()
        self.executor = ToyExecutor(vocab_size=VOCAB, num_pages=num_pages, page_size=page_size)
        self.coordinator = ContextCacheCoordinator(
            ContextCacheConfig(**config),
            self.deployment,
            profile or ContextCacheDeploymentProfile(),
            ContextCachePhysicalResources(base_cache=self.executor.kv_cache, base_page_table=self.table),
            self.device.stream,
            self.sync,
            load_plugins(autoload=False).policies if policies is None else policies,
            mirror=self.mirror,
            clock=self.clock,
        )
        self.executor.watch(self.coordinator.manager.pools)
        self.epoch = 0

    @property
    def manager(self):
        return self.coordinator.manager

    def admission(self, tokens, slot, *, salt=None, lookup=None, commit=None, epoch=None, key_extras=None, **fields):
        self.epoch += 1
        extras = key_extras or BlockKeyExtras(isolation_digest=None if salt is None else Hash128(7, salt))
        return ContextCacheSequenceAdmission(
            token_ids=np.asarray(tokens, np.int32),
            resident=ResidentRef(slot, self.epoch if epoch is None else epoch),
            key_extras=extras,
            lookup_policy=lookup,
            commit_policy=commit,
            salted=salt is not None,
            **fields,
        )

    def begin(self, *admissions, headroom=HEADROOM, **batch):
        result = self.coordinator.begin_request(
            ContextCacheBatchAdmission(sequences=list(admissions), **batch), headroom, self.device.stream
        )
        return result

    def begun(self, *admissions, headroom=HEADROOM, **batch):
        """Begin, and return the handle; it must succeed."""
        result = self.begin(*admissions, headroom=headroom, **batch)
        assert result.status is OK
        return result.admission.request

    def row(self, slot):
        return [page for page in self.table.row(slot).tolist() if page >= 0]

    def free(self):
        return self.manager.pools.base.free_count

    # --- driving the toy model ---------------------------------------------------------------------------

    def forward(self, request, work):
        """Run one step of `work` = [(index, query_length)]; returns the chosen token per entry."""
        sequences = [request.sequence(index) for index, _ in work]
        past = np.array([sequence.committed_state_length for sequence in sequences], np.int32)
        lengths = np.array([length for _, length in work], np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = [s.token_ids[p : p + n] for s, p, n in zip(sequences, past, lengths, strict=True)]
        places = [np.arange(p, p + n) for p, n in zip(past, lengths, strict=True)]
        logits = self.executor.forward(
            RaggedBatch(
                token_ids=np.concatenate(tokens).astype(np.int32),
                positions=np.concatenate(places).astype(np.int32),
                query_start=starts,
                query_len=lengths,
                past_len=past,
                state_index=np.array([sequence.resident.slot for sequence in sequences], np.int32),
                page_rows=self.table.rows,
                logits_index=(starts[1:] - 1).astype(np.int64),
                logits_to_seq=np.arange(len(work), dtype=np.int32),
            )
        )
        return logits.argmax(-1).tolist()

    def prefill(self, request):
        """The whole-batch prefill of an admitted request; returns each sequence's first token."""
        coordinator = self.coordinator
        assert coordinator.prepare_prefill(request) is OK
        assert coordinator.enqueue_prefill_captures(request) is OK
        work = [(i, s.num_tokens - s.committed_state_length) for i, s in enumerate(request.impl.sequences)]
        chosen = self.forward(request, work)
        advances = [
            ContextCacheSequenceAdvance([token], request.sequence(i).num_tokens) for i, token in enumerate(chosen)
        ]
        assert coordinator.finalize_prefill_publication(request, advances) is OK
        recount(coordinator)
        return chosen

    def decode(self, request, *, completed=(), hold=()):
        """One vanilla step; returns the token of each sequence (HOLD_TOKEN where it held)."""
        coordinator = self.coordinator
        active = [i for i in range(request.num_sequences) if i not in hold]
        assert coordinator.prepare_decode_step(request, HEADROOM, active) is OK
        chosen = dict(zip(active, self.forward(request, [(i, 1) for i in active]), strict=True)) if active else {}
        tokens = [chosen.get(i, HOLD_TOKEN) for i in range(request.num_sequences)]
        assert coordinator.complete_decode_step(request, OneTokenAdvances(tokens), list(completed)) is OK
        recount(coordinator)
        return tokens

    def run(self, tokens, num_tokens, *, slot=0, **admission):
        """One request from begin to finish; returns (generated tokens, reuse report)."""
        request = self.begun(self.admission(tokens, slot, **admission))
        report = request.sequence(0).reuse_report
        generated = self.prefill(request)
        for step in range(num_tokens - 1):
            last = step == num_tokens - 2
            generated.append(self.decode(request, completed=[0] if last else [])[0])
        assert self.coordinator.finish(request) is OK
        recount(self.coordinator)
        return generated, report

    # --- the container path ------------------------------------------------------------------------------

    def container(self):
        return self.begun()

    def join(self, request, tokens, slot, **admission):
        """Admit; returns the result."""
        return self.coordinator.admit_sequence(request, self.admission(tokens, slot, **admission), HEADROOM)

    def chunk(self, request, index, length):
        """Run a prompt chunk of one joiner as a step of its own; returns its token when it ended the prompt."""
        coordinator, sequence = self.coordinator, request.sequence(index)
        assert coordinator.prepare_decode_step(request, HEADROOM, []) is OK
        (token,) = self.forward(request, [(index, length)])
        committed = sequence.committed_state_length + length
        assert coordinator.advance_prefill(request, index, committed) is OK
        done = committed == sequence.num_tokens
        if done:
            advance = ContextCacheSequenceAdvance([token], committed)
            assert coordinator.finalize_sequence_admission(request, index, advance) is OK
        holds = OneTokenAdvances([HOLD_TOKEN] * request.num_sequences)
        assert coordinator.complete_decode_step(request, holds) is OK
        recount(coordinator)
        return token if done else None

    def retire(self, request, *indices):
        """Compact the named sequences away."""
        mapping, new = [], 0
        for index in range(request.num_sequences):
            mapping.append(-1 if index in indices else new)
            new += index not in indices
        assert self.coordinator.begin_batch_compaction(request, mapping, new) is OK
        status = self.coordinator.compact_batch(request)
        if status is OK:
            recount(self.coordinator)
        return status
