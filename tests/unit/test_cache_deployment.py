"""Identity framing, the support matrix and the reuse contracts of decoders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgellm._core.block_hash import TokenChain, append_each, encode_key_extras, hash_opaque_identity
from edgellm._core.page_table import KVPageTable
from edgellm.cache.deployment import (
    MAX_PAGES,
    check_config,
    check_geometry,
    check_resources,
    check_support,
    pool_capacities,
    resolve_spec_reuse_contract,
)
from edgellm.cache.identity import adapter_key, frame, isolation_digest, request_key_extras
from edgellm.cache.media import MediaItems, media_positions
from edgellm.cache.types import (
    AdapterKey,
    BaseStateKind,
    BlockKeyExtras,
    ContextCacheConfig,
    ContextCacheDeploymentProfile,
    ContextCachePhysicalResources,
    DeploymentConfig,
    Hash128,
    SpecReuseContract,
)
from edgellm.errors import InvalidArgumentError, UnsupportedModelError

ATTENTION, RECURRENT, HYBRID = BaseStateKind.ATTENTION_ONLY, BaseStateKind.PURE_RECURRENT, BaseStateKind.HYBRID


def test_framing_is_unambiguous():
    fields = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("abc", None), (None, "abc"), ("",), (None,), ()]
    assert len({frame(*entry) for entry in fields}) == len(fields)


def test_every_part_of_the_identity_separates():
    parts = itertools.product(("model-a", "model-b"), ("float32", "bfloat16"), (None, "", "x", "y"))
    digests = [isolation_digest(model_fingerprint=m, kv_dtype=d, cache_salt=s) for m, d, s in parts]
    assert len(set(digests)) == 16
    assert digests[0] == isolation_digest(model_fingerprint="model-a", kv_dtype="float32")


def test_adapter_and_salt_of_the_same_name_differ():
    """Fields of a key never run together: adapter X without salt is not salt X without adapter."""
    model = {"model_fingerprint": "m", "kv_dtype": "float32"}
    extras = [
        request_key_extras(**model),
        request_key_extras(**model, cache_salt="X"),
        request_key_extras(**model, adapter=adapter_key("X", 0)),
        request_key_extras(**model, adapter=adapter_key("X", 1)),
        request_key_extras(**model, adapter=adapter_key("Y", 0)),
        request_key_extras(**model, cache_salt="X", adapter=adapter_key("X", 0)),
        request_key_extras(**model, adapter=AdapterKey(0, 0)),
        BlockKeyExtras(),
    ]
    assert len({encode_key_extras(entry) for entry in extras}) == len(extras)


def test_identity_needs_model_and_dtype():
    with pytest.raises(InvalidArgumentError, match="must be non-empty"):
        isolation_digest(model_fingerprint="", kv_dtype="float32")


@pytest.mark.parametrize(
    ("kind", "contract"),
    [
        ("vanilla", None),
        ("mtp", SpecReuseContract(True, 1)),
        ("eagle", SpecReuseContract(True, 1)),
        ("dflash", SpecReuseContract(True, 0)),
        ("jetspec", SpecReuseContract(True, 0)),
        ("dspark", SpecReuseContract(True, 0)),
        ("shared_kv_mtp", SpecReuseContract(False, 0)),
        ("prompt_lookup", SpecReuseContract(False, 0)),
    ],
)
def test_56_reuse_contracts_of_decoders(kind, contract):
    assert resolve_spec_reuse_contract(kind, has_draft_config=True, has_spec_config=True) == contract
    if contract is not None and kind != "prompt_lookup":
        for draft, spec in ((False, True), (True, False)):
            with pytest.raises(InvalidArgumentError, match="needs a draft and a speculative configuration"):
                resolve_spec_reuse_contract(kind, has_draft_config=draft, has_spec_config=spec)


def test_56_unknown_decoder_is_an_error():
    with pytest.raises(InvalidArgumentError, match="'medusa' has no reuse contract"):
        resolve_spec_reuse_contract("medusa")


@pytest.mark.parametrize(
    ("base", "decoder", "supported"),
    [
        (ATTENTION, "vanilla", True),
        (ATTENTION, "eagle", True),
        (ATTENTION, "dflash", True),
        (ATTENTION, "jetspec", True),
        (ATTENTION, "dspark", True),
        (ATTENTION, "shared_kv_mtp", True),
        (ATTENTION, "prompt_lookup", True),
        (ATTENTION, "mtp", False),
        (RECURRENT, "vanilla", True),
        (RECURRENT, "eagle", False),
        (HYBRID, "vanilla", True),
        (HYBRID, "mtp", True),
        (HYBRID, "prompt_lookup", True),
        *[
            (RECURRENT, decoder, False)
            for decoder in ("mtp", "dflash", "jetspec", "dspark", "shared_kv_mtp", "prompt_lookup")
        ],
        *[(HYBRID, decoder, False) for decoder in ("eagle", "dflash", "jetspec", "dspark", "shared_kv_mtp")],
    ],
)
def test_157_support_matrix(base, decoder, supported):
    if supported:
        check_support(base, decoder)
        return
    with pytest.raises(UnsupportedModelError, match=f"(?i){decoder}.*not supported"):
        check_support(base, decoder)


@pytest.mark.parametrize(
    "option", [{"bidirectional_vision_attention": True}, {"trajectory_runner": True}, {"tensor_parallel_size": 2}]
)
def test_157_rejected_whatever_the_decoder(option):
    with pytest.raises(UnsupportedModelError):
        check_support(ATTENTION, "vanilla", **option)


@pytest.mark.parametrize(
    "change",
    [{"page_size": 0}, {"num_pages": 0}, {"num_pages": 2**31}, {"max_batch_size": True}, {"num_draft_pages": -1}],
)
def test_158_geometry_out_of_range_is_an_error(change):
    good = {"max_batch_size": 2, "max_input_length": 8, "max_kv_capacity": 8, "page_size": 4, "num_pages": 3}
    check_geometry(DeploymentConfig(**good))
    with pytest.raises(InvalidArgumentError, match=next(iter(change))):
        check_geometry(DeploymentConfig(**{**good, **change}))


HYBRID_MTP = ContextCacheDeploymentProfile(HYBRID, SpecReuseContract(True, 1))
EAGLE = ContextCacheDeploymentProfile(ATTENTION, SpecReuseContract(True, 1))
SHARED_KV = ContextCacheDeploymentProfile(ATTENTION, SpecReuseContract(False, 0))
GOOD = DeploymentConfig(
    max_batch_size=2, max_input_length=8, max_kv_capacity=8, page_size=4, num_pages=6, num_draft_pages=5
)


class FakeCache:
    def __init__(self, num_pages, page_size=4):
        self.num_pages, self.page_size = num_pages, page_size

    def copy_pages(self, sources, targets):
        raise NotImplementedError


class FakeStorage:
    def __init__(self, recurrent=3, partial=2, page_size=4):
        self.num_recurrent_slots, self.num_partial_slots, self.page_size = recurrent, partial, page_size


def resources(*, draft=False, storage=None, base=True):
    def pair(num_pages):
        return FakeCache(num_pages), KVPageTable(2, GOOD.pages_per_slot, num_pages)

    base_cache, base_table = pair(6) if base else (None, None)
    draft_cache, draft_table = pair(5) if draft else (None, None)
    return ContextCachePhysicalResources(base_cache, base_table, draft_cache, draft_table, storage)


@pytest.mark.parametrize(
    ("profile", "given", "capacities"),
    [
        (ContextCacheDeploymentProfile(), {}, (6, 0, 0, 0)),
        (EAGLE, {"draft": True}, (6, 5, 0, 0)),
        (SHARED_KV, {}, (6, 0, 0, 0)),
        (ContextCacheDeploymentProfile(HYBRID), {"storage": FakeStorage()}, (6, 0, 3, 2)),
        (HYBRID_MTP, {"storage": FakeStorage(), "draft": True}, (6, 5, 3, 2)),
        (ContextCacheDeploymentProfile(RECURRENT), {"storage": FakeStorage(partial=0), "base": False}, (15, 0, 3, 0)),
    ],
)
def test_157_what_each_supported_deployment_keeps(profile, given, capacities):
    check_resources(GOOD, profile, resources(**given))
    assert pool_capacities(GOOD, profile, resources(**given)).as_tuple() == capacities


@pytest.mark.parametrize(
    ("profile", "given", "words"),
    [
        (EAGLE, {}, "needs a draft cache and a draft page table"),
        (SHARED_KV, {"draft": True}, "neither a draft cache"),
        (ContextCacheDeploymentProfile(), {"storage": FakeStorage()}, "keeps no recurrent snapshots"),
        (ContextCacheDeploymentProfile(HYBRID), {}, "needs snapshot_storage"),
        (ContextCacheDeploymentProfile(HYBRID), {"storage": FakeStorage(partial=0)}, "the partial snapshot pool has 0"),
        (ContextCacheDeploymentProfile(HYBRID), {"storage": FakeStorage(recurrent=0)}, "the recurrent snapshot pool"),
        (ContextCacheDeploymentProfile(HYBRID), {"storage": FakeStorage(page_size=8)}, "page_size is 8"),
        (ContextCacheDeploymentProfile(RECURRENT), {"base": False}, "needs snapshot_storage"),
        (ContextCacheDeploymentProfile(), {"base": False}, "base_page_table is None"),
    ],
)
def test_158_resources_that_do_not_fit_the_flavour(profile, given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_resources(GOOD, profile, resources(**given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_cache": FakeCache(5)}, "base cache: num_pages is 5 and the deployment says 6"),
        ({"base_cache": FakeCache(6, 8)}, "base cache: page_size is 8 and the deployment says 4"),
        ({"draft_cache": FakeCache(4)}, "draft cache: num_pages is 4 and the deployment says 5"),
        ({"base_page_table": KVPageTable(3, 3, 6)}, "base page table: num_slots is 3"),
        ({"base_page_table": KVPageTable(2, 2, 6)}, "base page table: pages_per_slot is 2"),
        ({"draft_page_table": KVPageTable(2, 3, 6)}, "draft page table: num_pages is 6"),
    ],
)
def test_158_pools_and_tables_of_another_size_are_refused(change, words):
    given = resources(draft=True)
    for name, value in change.items():
        setattr(given, name, value)
    with pytest.raises(InvalidArgumentError, match=words):
        check_resources(GOOD, EAGLE, given)


def test_158_a_cache_that_cannot_copy_pages_is_refused():
    broken = resources()
    broken.base_cache = type("Mute", (), {"num_pages": 6, "page_size": 4})()
    with pytest.raises(InvalidArgumentError, match="cannot copy_pages"):
        check_resources(GOOD, ContextCacheDeploymentProfile(), broken)


def test_157_the_runtime_asks_the_support_matrix():
    from edgellm.plugins import load_plugins
    from edgellm.runtime.rank_runtime import LLMRankRuntime

    with pytest.raises(UnsupportedModelError, match=r"decoder .mtp. on an attention-only model is not supported"):
        LLMRankRuntime(
            None, None, GOOD, plugins=load_plugins(autoload=False), model_fingerprint="m", decoder_kind="mtp"
        )


def test_append_each_equals_single_appends():
    chains, twins = [TokenChain(2) for _ in range(3)], [TokenChain(2) for _ in range(3)]
    for step in range(5):
        tokens = np.array([step, 7 * step + 1, 90 - step], np.int32)
        append_each(chains, tokens)
        for twin, token in zip(twins, tokens.tolist(), strict=True):
            twin.append(token)
    assert [chain.token_ids().tolist() for chain in chains] == [twin.token_ids().tolist() for twin in twins]
    assert [chain.hash_at(1) for chain in chains] == [twin.hash_at(1) for twin in twins]
    with pytest.raises(InvalidArgumentError, match="2 tokens for 3 chains"):
        append_each(chains, np.zeros(2, np.int32))
    with pytest.raises(InvalidArgumentError, match="pass TokenChain objects"):
        append_each([chains[0], "x"], np.zeros(2, np.int32))
    assert [chain.num_tokens for chain in chains] == [5, 5, 5]


def test_a_decoder_without_a_draft_model_needs_no_configuration_and_others_are_not_assumed_to_have_one():
    assert resolve_spec_reuse_contract("vanilla") is None
    assert resolve_spec_reuse_contract("prompt_lookup") == SpecReuseContract(False, 0)
    with pytest.raises(InvalidArgumentError, match=r"\(draft: False, speculative: False\); pass both$"):
        resolve_spec_reuse_contract("eagle")


def test_a_framed_field_is_its_length_in_eight_little_endian_bytes_and_its_text():
    assert frame("ab", None, "") == b"\x01\x02" + bytes(7) + b"ab" + b"\x00" + b"\x01" + bytes(8)


def test_each_kind_of_identity_is_hashed_under_its_own_name():
    isolation = isolation_digest(model_fingerprint="m", kv_dtype="float32")
    assert isolation == hash_opaque_identity(frame("isolation", "m", "float32", None))
    assert adapter_key("X", 3) == AdapterKey(hash_opaque_identity(frame("adapter", "X")).lo, 3)


def test_the_digest_of_a_media_position_is_of_fields_of_eight_bytes():
    item = MediaItems((90,), (Hash128(3, 5),))
    fields = b"".join(number.to_bytes(8, "little") for number in (len("image"), 3, 5, 2, 1))
    assert media_positions([1, 90, 90], {"image": item})[2] == hash_opaque_identity(fields + b"image")


def test_the_same_item_elsewhere_in_a_prompt_has_the_same_digests():
    item = MediaItems((90,), (Hash128(3, 5),))
    early, late = (media_positions(tokens, {"image": item}) for tokens in ([90, 90, 7], [1, 2, 90, 90]))
    assert early[:2] == late[2:]
    assert early[2] is None
    assert len(set(early)) == 3


@pytest.mark.parametrize(("hi", "lo", "zero"), [(0, 0, True), (0, 5, False), (5, 0, False)])
def test_a_hash_is_zero_where_both_halves_are(hi, lo, zero):
    assert Hash128(hi, lo).is_zero() is zero


def test_158_each_flavour_needs_its_own_pools_and_the_largest_pool_is_allowed():
    sizes = {"max_batch_size": 2, "max_input_length": 8, "max_kv_capacity": 8, "page_size": 4}
    check_geometry(DeploymentConfig(**sizes, num_pages=0), ContextCacheDeploymentProfile(RECURRENT))
    check_geometry(DeploymentConfig(**sizes, num_pages=MAX_PAGES, num_draft_pages=MAX_PAGES), EAGLE)
    with pytest.raises(InvalidArgumentError, match="num_pages is 0"):
        check_geometry(DeploymentConfig(**sizes, num_pages=0))
    with pytest.raises(InvalidArgumentError, match="num_draft_pages is 0"):
        check_geometry(DeploymentConfig(**sizes, num_pages=3), EAGLE)


def test_157_numbers_for_all_blocks_of_a_recurrent_deployment_may_just_fit():
    profile = ContextCacheDeploymentProfile(RECURRENT)
    # The limit is a prime, so only rows of one page can fill it: of a capacity of none, which check_geometry refuses.
    deployment = DeploymentConfig(max_batch_size=2, max_input_length=1, max_kv_capacity=0, page_size=4, num_pages=0)
    assert deployment.pages_per_slot == 1
    fits = resources(storage=FakeStorage(recurrent=MAX_PAGES - 2), base=False)
    assert pool_capacities(deployment, profile, fits).base_kv_pages == MAX_PAGES
    exceeds = resources(storage=FakeStorage(recurrent=MAX_PAGES - 1), base=False)
    with pytest.raises(InvalidArgumentError, match=f"exceed {MAX_PAGES}"):
        pool_capacities(deployment, profile, exceeds)


def test_158_a_checkpoint_interval_of_one_token_is_allowed_and_none_smaller():
    check_config(ContextCacheConfig(checkpoint_interval_tokens=1))
    for interval in (0, -1, True, 1.0):
        with pytest.raises(InvalidArgumentError, match="checkpoint_interval_tokens"):
            check_config(ContextCacheConfig(checkpoint_interval_tokens=interval))


def test_158_resources_are_judged_by_the_flavour_they_are_for():
    recurrent = ContextCacheDeploymentProfile(RECURRENT)
    paged = {"max_batch_size": 2, "max_input_length": 8, "max_kv_capacity": 8, "page_size": 4}
    check_resources(DeploymentConfig(**paged, num_pages=0), recurrent, resources(storage=FakeStorage(), base=False))
    broken = resources(draft=True)
    broken.draft_cache = type("Mute", (), {"num_pages": 5, "page_size": 4})()
    with pytest.raises(InvalidArgumentError, match=r"^draft_cache is Mute and cannot copy_pages"):
        check_resources(GOOD, EAGLE, broken)
