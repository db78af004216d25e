"""``specdec verify``: equal, a near tie or a fault."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import specdec.backends
import specdec.cli.verify
from specdec import Logits, ModelBackend, SamplingParams, Span
from specdec.cli.verify import verify
from specdec.parity import compare, judge
from specdec.sampling import Sampler
from specdec.testing import TableBackend

app = typer.Typer()
app.command()(verify)


class Changed:
    """A backend whose rows, where a forward has several tokens, are changed."""

    def __init__(self, inner: ModelBackend, change: Callable[[Any], Any]) -> None:
        self.inner, self.change = inner, change
        self.vocab, self.max_context = inner.vocab, inner.max_context
        self.new_cache, self.crop, self.info = inner.new_cache, inner.crop, inner.info

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        rows = self.inner.forward(batch)
        return [
            self.change(row) if len(span.tokens) > 1 and span.num_logits else row
            for span, row in zip(batch, rows, strict=True)
        ]


def rounded(rows: Any) -> Any:
    """As if of few bits: near ties become ties, and the first id wins."""
    return np.round(rows * 5) / 5


def wrong(rows: Any) -> Any:
    """Every row is the one of another text."""
    return np.roll(rows, 1, axis=-1)


def shifted(rows: Any) -> Any:
    """Wrong by little, but in one place by much more than anywhere else is likely."""
    return rows + np.linspace(0, 3, rows.shape[-1], dtype=np.float32)


def tied(seed: int = 0) -> TableBackend:
    """A model with many near ties."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((8, 8, 8))
    second, best = np.argsort(table)[..., -2:].transpose(2, 0, 1)
    i, j = np.indices(best.shape)
    near = rng.random(best.shape) < 0.5
    ties = table[i, j, best] - 0.05
    table[i, j, second] = np.where(near, ties, table[i, j, second])
    return TableBackend(table)


PROMPTS = [[seed % 8, (3 * seed + 1) % 8] for seed in range(12)]


def test_a_right_pair_is_equal_and_says_what_was_checked() -> None:
    target = TableBackend.random(seed=1)
    draft = target.sibling(0.3)
    found = list(compare(target, draft, PROMPTS, max_new_tokens=40))
    assert [one.verdict for one in found] == ["equal"] * len(PROMPTS)
    assert all(one.num_tokens == 40 for one in found)
    assert all(0 < one.num_correct_drafts <= one.num_proposed_drafts for one in found)
    assert all(one.strict_seconds is one.loose_equal is None for one in found)
    assert (target.open_caches, draft.open_caches) == (0, 0)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, top_k=4, top_p=0.8, seed=3),
    ],
)
def test_rounding_is_a_near_tie_and_wrong_rows_are_a_fault(sampling: SamplingParams) -> None:
    model = tied()
    verdicts = {}
    for change in (rounded, wrong, shifted):
        target = Changed(model, change)
        found = list(compare(target, model, PROMPTS, max_new_tokens=40, sampling=sampling))
        verdicts[change] = {one.verdict for one in found}
        for difference in (one.difference for one in found if one.difference is not None):
            assert difference.plain_id != difference.speculative_id
            assert difference.top_gap >= 0
            assert difference.bound >= 2 * difference.rounding
            assert difference.fault == ("near tie" not in difference.why)
    assert "near tie" in verdicts[rounded]
    assert "fault" not in verdicts[rounded]
    assert "fault" in verdicts[wrong] & verdicts[shifted]
    assert "near tie" not in verdicts[wrong]
    assert model.open_caches == 0


def test_the_gap_is_of_the_targets_own_row() -> None:
    table = np.zeros((3, 3, 3))
    table[..., :] = [1.0, 0.99, -5.0]
    target = Changed(TableBackend(table), lambda rows: rows + np.array([0, 0.02, 0], np.float32))
    (one,) = compare(target, TableBackend(table), [[2, 2]], max_new_tokens=8)
    difference = one.difference
    assert difference is not None
    assert (difference.position, difference.plain, difference.speculative) == (0, "a", "b")
    assert difference.top_gap == difference.gap == pytest.approx(0.01, abs=1e-6)
    assert difference.rounding == pytest.approx(0.02, abs=1e-6)
    assert difference.bound == pytest.approx(0.04, abs=1e-6)
    assert not difference.fault


def test_a_near_tie_is_no_excuse_for_a_third_token() -> None:
    table = np.zeros((3, 3, 3))
    table[..., :] = [1.0, 1.0001, -5.0]
    model = TableBackend(table)
    greedy = SamplingParams()
    assert judge(model, [0], [1, 1], [0, 1], greedy).fault  # no rows differ, so nothing excuses it
    assert judge(model, [0], [1, 1], [2, 1], greedy).fault
    near = Changed(model, lambda rows: rows + np.array([0.001, 0, 0], np.float32))
    assert not judge(near, [0], [1, 1], [0, 1], greedy).fault
    assert judge(near, [0], [1, 1], [2, 1], greedy).fault
    assert judge(near, [0], [2, 1], [1, 1], greedy).why.startswith("the plain text's token lies")


def test_a_text_that_ends_early_is_a_fault() -> None:
    difference = judge(tied(), [0], [1, 2], [1], SamplingParams())
    assert difference.fault
    assert (difference.position, difference.speculative_id, difference.gap) == (1, None, math.inf)
    assert "the speculative text ended before the other" in difference.why


def test_scores_that_are_equal_but_for_the_last_bit_are_a_tie() -> None:
    table = np.full((2, 2, 2), 20.0, np.float32)
    table[..., 1] = np.nextafter(np.float32(20), np.float32(21))
    assert not judge(TableBackend(table), [0], [1], [0], SamplingParams()).fault


@given(
    st.integers(0, 40),
    st.sampled_from([(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (5, 0.9, 0.05)]),
    st.floats(0, 1.5),
)
def test_what_a_rounded_row_chooses_is_never_a_fault(
    seed: int, filters: tuple[int, float, float], temperature: float
) -> None:
    """A token at the edge of a filter may be in by one row and out by the other."""
    top_k, top_p, min_p = filters
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    rng = np.random.default_rng(seed)
    model = TableBackend(rng.standard_normal((12, 12, 12)))
    noise = rng.uniform(-0.15, 0.15, 12).astype(np.float32)
    target = Changed(model, lambda rows: rows + noise)
    sampler = Sampler(params, target.vocab, 1)
    for token in range(12):
        row = model.table[token, token]
        plain, wide = (
            int(np.argmax(sampler.scores(each[None], [token])[0])) for each in (row, row + noise)
        )
        if plain != wide:
            assert not judge(target, [token], [plain], [wide], params).fault


def test_strict_decoding_is_equal_and_its_cost_is_told() -> None:
    model = tied()
    target = Changed(model, rounded)
    found = list(compare(target, model, PROMPTS, max_new_tokens=40, strict=True))
    assert {one.verdict for one in found} == {"equal"}
    assert False in {one.loose_equal for one in found}
    assert sum(one.strict_ct for one in found) > 0
    assert all(one.strict_seconds for one in found)


def run(
    monkeypatch: pytest.MonkeyPatch, target: ModelBackend, draft: ModelBackend | None, *more: str
) -> Result:
    """The command on these two, whatever models are named."""
    monkeypatch.setattr(specdec.cli.verify, "open_pair", lambda *_: (target, draft))
    return CliRunner().invoke(app, list(more))


def test_the_exit_code_is_1_on_a_fault_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tied()
    file = tmp_path / "prompts.txt"
    file.write_text("ab\ncad\nface\nbeef\ndad\n")
    common = ["--prompts", str(file), "--max-new-tokens", "40"]
    right = run(monkeypatch, model, model.sibling(0.2), *common)
    assert right.exit_code == 0
    assert "5 prompts, 200 tokens: all equal to plain decoding" in right.stdout
    near = run(monkeypatch, Changed(model, rounded), model, *common)
    assert near.exit_code == 0
    assert "near tie: the scores are" in near.stdout
    assert "top-two gap 0." in near.stdout
    assert "parted at near ties, no faults" in near.stdout
    fault = run(monkeypatch, Changed(model, wrong), model, *common)
    assert fault.exit_code == 1
    assert "the target computes them wrongly" in fault.stdout
    strict = run(monkeypatch, Changed(model, rounded), model, *common, "--strict")
    assert strict.exit_code == 0
    assert "all equal to plain decoding" in strict.stdout
    assert "were decided again, for" in strict.stdout


def test_prompts_that_are_too_long_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = TableBackend.random(8, max_context=8)
    file = tmp_path / "prompts.txt"
    file.write_text("abcdefgabc\nab\n")
    done = run(monkeypatch, model, model, "--prompts", str(file))
    assert done.exit_code == 0
    assert "1 prompt left out: more tokens than the target's context of 8" in done.stderr
    assert "1 prompt, 7 tokens: all equal to plain decoding" in done.stdout
    file.write_text("abcdefgabc\n")
    done = run(monkeypatch, model, model, "--prompts", str(file))
    assert done.exit_code == 2
    assert "all prompts have more tokens" in done.stderr


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied()
    options = ["--json", "--temperature", "1", "--num-draft-tokens", "auto"]
    done = run(monkeypatch, Changed(model, wrong), model, *options)
    printed = json.loads(done.stdout)
    assert printed["equal"] + printed["near_ties"] + printed["faults"] == len(printed["prompts"])
    assert isinstance(printed["seed"], int)
    assert printed["target"] == printed["draft"] == model.info()
    assert {one["verdict"] for one in printed["prompts"]} <= {"equal", "near tie", "fault"}
    assert done.exit_code == (1 if printed["faults"] else 0)


def test_ctrl_c_leaves_a_partial_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for more in ([], ["--json"]):
        target = TableBackend.random(seed=1)
        target.fail_at, target.fault = 150, KeyboardInterrupt()
        done = run(monkeypatch, target, target.sibling(0.3), "--max-new-tokens", "40", *more)
        assert done.exit_code == 130
        assert "interrupted" in done.stderr
        if more:
            printed = json.loads(done.stdout)
            assert printed["interrupted"] is True
            assert 0 < printed["equal"] < 6
        else:
            assert "of 6 prompts" in done.stdout


def test_an_error_before_any_comparison_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableBackend.random(seed=1)
    target.fail_at, target.fault = 0, RuntimeError("the power went")
    done = run(monkeypatch, target, target.sibling(0.3))
    assert done.exit_code == 2
    assert "nothing was compared" in done.stdout
    target.call_ct = 0
    printed = json.loads(run(monkeypatch, target, target.sibling(0.3), "--json").stdout)
    assert (printed["interrupted"], printed["error"]) == (False, "the power went")


def test_only_so_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableBackend.random(seed=1)
    done = run(monkeypatch, target, target, "--limit", "2", "--json", "--max-new-tokens", "4")
    assert len(json.loads(done.stdout)["prompts"]) == 2


def test_no_draft_and_idle_drafts_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableBackend.random(seed=1)
    none = run(monkeypatch, model, None)
    assert none.exit_code == 2
    assert "nothing to verify without a draft" in none.stderr
    idle = run(monkeypatch, model, model, "--num-draft-tokens", "0")
    assert idle.exit_code == 0
    assert "no draft was checked, so this shows nothing: num_draft_tokens is 0" in idle.stdout


def test_models_of_every_mix(one_thread: None, tiny_llama: Any, tiny_draft: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    names = {
        "folder": (tiny_llama.folder, tiny_draft.folder),
        "gguf": (tiny_llama.gguf, tiny_draft.gguf),
    }
    for mine in names:
        for theirs in (*names, "self", "none"):
            draft = str(names[theirs][1]) if theirs in names else theirs
            options = ["--target-model", str(names[mine][0]), "--draft-model", draft]
            done = CliRunner().invoke(
                app, [*options, "--max-new-tokens", "12", "--n-threads", "1", "--json"]
            )
            if theirs == "none" or (mine, theirs) == ("gguf", "self"):
                assert done.exit_code == 2, done.output
                continue
            assert done.exit_code == 0, done.output
            printed = json.loads(done.stdout.splitlines()[-1])
            assert printed["faults"] == 0
            assert printed["num_proposed_drafts"] > 0


def test_low_precision_parts_at_near_ties_only(
    one_thread: None, tiny_llama: Any, tiny_draft: Any
) -> None:
    pytest.importorskip("transformers")
    from specdec.backends import HFBackend

    target = HFBackend(tiny_llama.folder, dtype="bfloat16")
    draft = HFBackend(tiny_draft.folder)
    prompts = [[seed % 200 + 40, seed % 7 + 60] for seed in range(20)]
    found = list(compare(target, draft, prompts, max_new_tokens=48))
    assert {one.verdict for one in found} == {"equal", "near tie"}
    for difference in (one.difference for one in found if one.difference is not None):
        assert difference.gap <= difference.bound < 1.0
