"""From a request to an admission: media identity, adapters, and what a completed step reports."""

from __future__ import annotations

import numpy as np
import pytest
from coordinator_rig import HEADROOM, OK, VOCAB, Rig

from edgellm._core.block_hash import CHAIN_ROOT, TokenChain, hash_block, hash_full_blocks
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances, completed_token
from edgellm.cache.identity import adapter_key, request_key_extras
from edgellm.cache.media import MediaItems, media_positions
from edgellm.cache.types import Hash128, ReuseStopReason
from edgellm.errors import InvalidArgumentError, InvariantError
from edgellm.testing.toy import toy_generate

P = 4
IMAGE, IMAGE_ROW, AUDIO = 40, 41, 42
CAT, DOG, BARK = Hash128(1, 1), Hash128(2, 2), Hash128(3, 3)


def image(*digests):
    return MediaItems((IMAGE, IMAGE_ROW), digests)


def audio(*digests):
    return MediaItems((AUDIO,), digests)


def image_positions(tokens, *digests):
    return media_positions(tokens, {"image": image(*digests)})


def blocks(tokens, *digests):
    return list(hash_full_blocks(tokens, P, media=image_positions(tokens, *digests)))


# --- media ---------------------------------------------------------------------------------------------------


def test_159_runs_and_items_must_agree():
    two_runs = [1, IMAGE, IMAGE, 2, IMAGE]
    with pytest.raises(InvalidArgumentError, match="2 runs of image placeholders and 1 image items"):
        image_positions(two_runs, CAT)
    with pytest.raises(InvalidArgumentError, match="2 runs of image placeholders and 3 image items"):
        image_positions(two_runs, CAT, CAT, DOG)
    with pytest.raises(InvalidArgumentError, match="0 runs of audio placeholders and 1 audio items"):
        media_positions(two_runs, {"image": image(CAT, DOG), "audio": audio(BARK)})
    assert [digest is None for digest in image_positions(two_runs, CAT, DOG)] == [True, False, False, True, False]


def test_159_the_same_bytes_at_other_positions_give_other_blocks():
    tokens = [IMAGE] * 4 + [7] * 4 + [IMAGE] * 4
    first, _, third = blocks(tokens, CAT, CAT)
    assert first != third
    # Not because of what stands before them alone: the two halves of one picture differ under one parent as well.
    whole = image_positions([IMAGE] * 8, CAT)
    assert len(set(whole)) == 8
    halves = [hash_block(CHAIN_ROOT, [IMAGE] * 4, None, whole[start : start + 4]) for start in (0, 4)]
    assert halves[0] != halves[1]
    # Shifted by one place within the block, and as another number of patches.
    assert blocks([7, IMAGE, IMAGE, IMAGE], CAT) != blocks([IMAGE, IMAGE, IMAGE, 7], CAT)
    assert blocks([IMAGE] * 5, CAT) != blocks([IMAGE] * 6, CAT)


def test_159_equal_content_at_equal_positions_gives_equal_blocks():
    tokens = [1, IMAGE, IMAGE, 2, 3, IMAGE, IMAGE, 4]
    assert blocks(tokens, CAT, DOG) == blocks(list(tokens), CAT, DOG)
    assert blocks([1, IMAGE_ROW, IMAGE, *tokens[3:]], CAT, DOG) == blocks(tokens, CAT, DOG)  # the id says nothing
    same_first = blocks(tokens, CAT, CAT)
    assert (same_first[0], same_first[1]) == (blocks(tokens, CAT, DOG)[0], same_first[1])
    assert same_first[1] != blocks(tokens, CAT, DOG)[1]
    assert blocks(tokens, DOG, CAT)[0] != same_first[0]


def test_159_modalities_take_their_own_items_in_order():
    tokens = [AUDIO, AUDIO, IMAGE, IMAGE_ROW, 5, IMAGE]
    both = media_positions(tokens, {"image": image(CAT, DOG), "audio": audio(BARK)})
    assert both == media_positions(np.array(tokens, np.int32), {"audio": audio(BARK), "image": image(CAT, DOG)})
    # One item of two ids is one run, and a run of another modality beside it is another one.
    alone = media_positions(tokens, {"image": image(CAT, DOG)})
    assert alone == (None, None, *both[2:])
    # The same digest as a picture and as a sound is not the same content.
    as_sound = media_positions([AUDIO], {"audio": audio(CAT)})
    assert as_sound != image_positions([IMAGE], CAT)
    # An id that two modalities name belongs to the first.
    shared = {"image": MediaItems((9,), (CAT,)), "audio": MediaItems((9, AUDIO), (BARK,))}
    assert [digest is None for digest in media_positions([9, AUDIO, 1], shared)] == [False, False, True]
    assert media_positions([9, AUDIO, 1], shared)[0] == media_positions([9], {"image": MediaItems((9,), (CAT,))})[0]


def test_159_a_prompt_without_media_is_text():
    assert media_positions([1, 2, 3], {}) == ()
    assert media_positions([1, 2, 3], {"image": image(), "audio": audio()}) == ()
    assert media_positions([], {"image": image()}) == ()
    text, prompt = TokenChain(P), TokenChain(P, None, media_positions([1, 2, 3, 4], {"image": image()}))
    for chain in (text, prompt):
        chain.extend([1, 2, 3, 4])
    assert prompt.hash_at(0) == text.hash_at(0)
    assert not prompt.has_media


@pytest.mark.parametrize("digest", [None, Hash128(0, 0)])
def test_159_an_item_that_could_not_be_read_is_never_taken_for_text(digest):
    with pytest.raises(InvalidArgumentError, match=r"image item 1 has no content digest.*BYPASS"):
        image_positions([IMAGE, 1, IMAGE], CAT, digest)


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5, 2.0], ["a"]])
def test_ids_that_are_no_row_of_integers_are_refused(tokens):
    with pytest.raises(InvalidArgumentError, match=r"pass \(n,\) integers"):
        media_positions(tokens, {"image": image()})


def test_159_the_coordinator_shares_a_picture_only_where_it_is_the_same():
    rig = Rig(num_pages=24)
    prompt = [1, IMAGE, IMAGE, 2, 3, IMAGE, IMAGE, 4, 5]
    shown = {"per_position_media_hash": image_positions(prompt, CAT, DOG)}
    text, report = rig.run(prompt, 2, **shown)
    assert report.reused_tokens == 0
    for digests, reused, reason in (
        ((CAT, DOG), 8, ReuseStopReason.FULL),
        ((CAT, CAT), 4, ReuseStopReason.MEDIA),
        ((DOG, DOG), 0, ReuseStopReason.MEDIA),
    ):
        again, report = rig.run(prompt, 2, per_position_media_hash=image_positions(prompt, *digests))
        assert (report.reused_tokens, report.stop_reason) == (reused, reason)
        assert again == text == toy_generate(prompt, 2, VOCAB)


# --- adapters ------------------------------------------------------------------------------------------------


def keyed(rig, tokens, num_tokens, adapter):
    """A request under `adapter` from admission to finish."""
    extras = request_key_extras(model_fingerprint="m", kv_dtype="float16", adapter=adapter)
    return rig.run(tokens, num_tokens, key_extras=extras)


def test_160_adapters_share_nothing_and_a_reload_neither():
    rig = Rig(num_pages=40)
    prompt = list(range(3, 13))
    keys = [None, adapter_key("a", 0), adapter_key("b", 0), adapter_key("a", 1)]
    assert len(set(keys)) == 4
    for key in keys:
        _, report = keyed(rig, prompt, 3, key)
        assert (report.reused_tokens, report.matched_tokens) == (0, 0)
    assert rig.manager.index.num_namespaces == 4
    for key in keys:
        _, report = keyed(rig, [*prompt, 50, 51], 1, key)
        assert report.reused_tokens == 10
    assert adapter_key("a", 0) == adapter_key("a", 0)


# --- completion ----------------------------------------------------------------------------------------------


def test_161_no_new_token_is_a_hold_for_who_leaves_and_an_error_for_who_stays():
    assert completed_token(3, [5, 6], withdrawn=False) == 6
    assert completed_token(3, [], withdrawn=True) == HOLD_TOKEN
    assert completed_token(3, [5], withdrawn=True) == HOLD_TOKEN
    with pytest.raises(InvariantError, match="slot 3 took part in a step and got no token"):
        completed_token(3, [], withdrawn=False)


def test_161_the_hold_of_a_cancelled_sequence_leaves_its_ledger_alone():
    rig = Rig()
    request = rig.begun(rig.admission(list(range(3, 8)), 0), rig.admission(list(range(20, 27)), 1))
    rig.prefill(request)
    rig.coordinator.prepare_decode_step(request, HEADROOM)
    rows = [completed_token(0, [9], withdrawn=False), completed_token(1, [], withdrawn=True)]
    assert rig.coordinator.complete_decode_step(request, OneTokenAdvances(rows)) is OK
    assert [(s.num_tokens, s.committed_state_length) for s in request.impl.sequences] == [(7, 6), (8, 7)]
    assert rig.coordinator.finish(request) is OK
