"""Where checkpoints go: exact lengths for every rule, and each rule's limits."""

from __future__ import annotations

import pytest

from edgellm.cache.policy import CheckpointContext
from edgellm_hybrid.placement import branch_point, place_checkpoints, rungs, stable_end


def prompt(num_tokens=100, **changes):
    values = {
        "num_tokens": num_tokens,
        "reuse_token_length": 0,
        "known_token_length": 0,
        "page_size": 8,
        "interval": None,
        "template_boundaries": (),
        "replay_tail_length": 0,
    }
    return CheckpointContext(**{**values, **changes})


def placed(num_tokens=100, *, dense=False, **changes):
    return place_checkpoints(prompt(num_tokens, **changes), dense=dense)


@pytest.mark.parametrize("num_tokens", [1, 8, 100])
def test_a_bare_prompt_gets_its_end(num_tokens):
    assert placed(num_tokens) == (num_tokens,)


def test_the_end_is_left_out_where_something_else_was_placed():
    assert placed(100, interval=64) == (64,)
    assert placed(100, template_boundaries=(50,)) == (50,)
    assert placed(100, known_token_length=40) == (40,)


def test_the_ladder_doubles_its_distances():
    assert rungs(1000, 64) == (512, 768, 896, 960)
    assert rungs(960, 64) == (512, 768, 896)  # strictly below the end
    assert rungs(65, 64) == (64,)
    assert rungs(64, 64) == ()
    assert rungs(10**6, 512)[-1] == 999_936
    assert len(rungs(10**6, 512)) <= 11
    assert rungs(1000, None) == ()


def test_a_dense_ladder_has_every_rung():
    assert rungs(20, 4, dense=True) == (4, 8, 12, 16)
    assert placed(20, interval=4, dense=True) == (4, 8, 12, 16)


def test_an_interval_need_not_be_whole_pages():
    assert placed(100, interval=30) == (60, 90)


def test_rungs_within_the_reused_prefix_stay_wanted():
    assert placed(1000, interval=64, reuse_token_length=768) == (512, 768, 896, 960)
    assert placed(1000, interval=64, reuse_token_length=960) == (512, 768, 896, 960, 1000)  # nothing new but the end


def test_template_boundaries_are_kept_exactly():
    assert placed(100, template_boundaries=(13, 50)) == (13, 50)
    assert placed(100, template_boundaries=(0, 13, 100, 101)) == (13, 100)


def test_the_branch_point_is_aligned_down_to_a_page():
    assert placed(100, known_token_length=61) == (56,)
    assert placed(100, known_token_length=64) == (64,)


def test_a_branch_point_within_the_reused_prefix_is_none():
    assert placed(100, reuse_token_length=56, known_token_length=61) == (100,)
    assert placed(100, reuse_token_length=55, known_token_length=61) == (56,)


def test_a_prompt_known_to_its_end_branches_before_its_last_token():
    assert branch_point(prompt(96, known_token_length=96)) == 88
    assert branch_point(prompt(97, known_token_length=97)) == 96
    assert branch_point(prompt(4, known_token_length=4)) == 0


def test_places_that_coincide_are_named_once():
    assert placed(65, template_boundaries=(32, 64), known_token_length=32, interval=32) == (32, 64)


def test_the_stable_end_leaves_the_volatile_tail_out():
    assert stable_end(prompt(100, replay_tail_length=5)) == 95
    assert placed(100, replay_tail_length=5) == (95,)
    assert placed(100, replay_tail_length=5, interval=48, template_boundaries=(98,)) == (48,)


def test_a_prompt_whose_new_part_is_its_tail_ends_at_its_end():
    assert stable_end(prompt(100, replay_tail_length=5, reuse_token_length=95)) == 100
    assert stable_end(prompt(100, replay_tail_length=5, reuse_token_length=94)) == 95
    assert stable_end(prompt(3, replay_tail_length=3)) == 3


def test_the_sparse_ladder_is_the_default():
    assert place_checkpoints(prompt(28, interval=4)) == (16, 24) == placed(28, interval=4)
    assert rungs(28, 4) == (16, 24)


def test_one_token_is_a_place_like_any_other():
    assert placed(100, template_boundaries=(1, 50)) == (1, 50)
    assert placed(2, interval=1) == (1,)
