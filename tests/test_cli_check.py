"""``specdec check``: may a pair work, what does it cost, and when does it pay?"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

import specdec.cli.check
from specdec import CropError, Logits, ModelBackend, Span
from specdec.cli.check import check
from specdec.report import ModelFacts, PairCosts, PairReport, examine
from specdec.rounding import rounding_limit, row_stability, sample_ids
from specdec.testing import TableBackend

app = typer.Typer()
app.command()(check)


class Wrapper:
    """A backend with something changed."""

    def __init__(self, inner: ModelBackend) -> None:
        self.inner = inner
        self.vocab, self.max_context, self.new_cache = (
            inner.vocab,
            inner.max_context,
            inner.new_cache,
        )

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        return self.inner.forward(batch)

    def crop(self, cache: Any, length: int) -> None:
        self.inner.crop(cache, length)

    def info(self) -> Mapping[str, object]:
        return self.inner.info()


class Slow(Wrapper):
    """Takes so many milliseconds per forward, and more per token."""

    def __init__(self, inner: ModelBackend, fixed: float, per_token: float = 0.0) -> None:
        super().__init__(inner)
        self.fixed, self.per_token = fixed, per_token

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        tokens = sum(len(span.tokens) for span in batch)
        end = time.perf_counter() + (self.fixed + self.per_token * tokens) / 1000
        rows = super().forward(batch)
        while time.perf_counter() < end:
            pass
        return rows


class Shifted(Wrapper):
    """Wide rows are other ones, by so much."""

    def __init__(self, inner: ModelBackend, shift: float) -> None:
        super().__init__(inner)
        self.shift = np.linspace(0, shift, inner.vocab.size, dtype=np.float32)

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        rows = super().forward(batch)
        return [
            row + self.shift if len(span.tokens) > 1 else row
            for span, row in zip(batch, rows, strict=True)
        ]


class NoCrop(Wrapper):
    def crop(self, cache: Any, length: int) -> None:
        raise CropError("a recurrent state can't go back")


class FalseCrop(Wrapper):
    """Keeps what it was told to drop, but for the length."""

    def crop(self, cache: Any, length: int) -> None:
        self.inner.crop(cache, length)
        if length:
            cache.ids[-1] = (cache.ids[-1] + 1) % self.vocab.num_tokens


class Weighty(Wrapper):
    def info(self) -> Mapping[str, object]:
        return {**self.inner.info(), "weight_bytes": 2_500_000, "dtype": "float32"}


def last(target: ModelBackend, draft: ModelBackend | None) -> PairReport:
    *_, report = examine(target, draft)
    return report


def test_a_pair_that_pays() -> None:
    model = TableBackend.random(seed=1)
    target, draft = Slow(model, 4.0), Slow(model.sibling(0.3), 0.4)
    report = last(target, draft)
    assert (report.num_shared, report.num_different, report.problem) == (8, 0, None)
    assert [one.difference for one in report.stability] == [0, 0, 0]
    costs = report.costs
    assert costs is not None
    assert costs.draft_ms is not None
    assert set(costs.verify_ms) >= {1, 2, 5, 9, 17}
    assert 4 <= costs.plain_ms < 8
    assert 0.4 <= costs.draft_ms < 1.6
    assert report.break_even is not None
    assert 0.02 < report.break_even < 0.6
    low, middle, high = report.expectations
    assert (low.acceptance, middle.acceptance, high.acceptance) == (0.5, 0.7, 0.9)
    assert 1 < low.speedup < middle.speedup < high.speedup
    assert low.num_draft_tokens <= middle.num_draft_tokens <= high.num_draft_tokens
    rows, pays = report.verdict
    assert "don't depend on the width" in rows
    assert f"pays from {100 * report.break_even:.0f} % acceptance; at 70 % expect" in pays
    assert model.open_caches == 0


def test_a_pair_that_never_pays() -> None:
    model = TableBackend.random(seed=1)
    report = last(Slow(model, 1.0), Slow(model.sibling(0.3), 3.0))
    assert report.break_even is None
    assert all(one.num_draft_tokens == 0 for one in report.expectations)
    assert "this pair never pays here: a draft token takes" in report.verdict[-1]


def test_the_words_of_the_verdict() -> None:
    facts = ModelFacts({}, 8, 8, 64, None)
    costs = PairCosts(10.0, {1: 10.0, 2: 11.0, 9: 12.0}, 9.0, 1.0, 0.0)
    never = PairReport(facts, facts, costs=costs)
    assert never.verdict == [
        "this pair never pays here: a draft token takes 0.9 of a plain step, and a forward that "
        "checks one 1.1"
    ]
    alone = PairReport(facts, None, costs=costs)
    assert "would bring up to 7.5x here, with 8 tokens" in alone.verdict[0]
    narrow = PairReport(facts, None, costs=replace(costs, verify_ms={1: 10.0, 2: 11.0}))
    assert narrow.verdict[0].endswith("with 1 token")


def test_a_target_alone() -> None:
    report = last(Slow(TableBackend.random(seed=1), 1.0), None)
    assert report.draft is None
    assert report.break_even is None
    assert report.costs is not None
    assert report.costs.draft_ms is report.costs.read_ms is None
    assert report.expectations == ()
    assert "there is no draft" in report.verdict[-1]


def test_single_ids_may_differ_and_tables_may_be_longer() -> None:
    target = TableBackend.random(30, seed=1, padding=2)
    tokens = list(target.vocab.tokens[:29])
    tokens[3], tokens[4] = tokens[4], None
    draft = TableBackend(target.table[:29, :29, :29], tokens=tokens)
    report = last(target, draft)
    assert (report.num_shared, report.num_different) == (27, 2)
    assert report.problem is None
    assert report.target.size == 32


class Broken(Wrapper):
    """Holds a NaN in the rows of forwards over so many tokens and more."""

    def __init__(self, inner: ModelBackend, width: int) -> None:
        super().__init__(inner)
        self.width = width

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        rows = [np.array(row) for row in super().forward(batch)]
        for span, row in zip(batch, rows, strict=True):
            row[..., 2] = np.nan if len(span.tokens) >= self.width else row[..., 2]
        return list(rows)


@pytest.mark.parametrize("width", [1, 9])
def test_rows_with_a_nan_are_called_so(width: int) -> None:
    model = TableBackend.random(seed=1)
    assert str(last(Broken(model, width), model).problem).startswith("the target's rows hold NaN")
    if width == 1:
        report = last(model, Broken(model, width))
        assert str(report.problem).startswith("the draft's rows hold NaN")
        assert "try another dtype" in report.verdict[0]
    assert model.open_caches == 0


@pytest.mark.parametrize("side", ["target", "draft"])
def test_what_cannot_work_says_why(side: str) -> None:
    model = TableBackend.random(seed=1)
    for kind, problem in ((NoCrop, "can't crop its cache: a recurrent"), (FalseCrop, "other ones")):
        broken = kind(model)
        pair = (broken, model) if side == "target" else (model, broken)
        report = last(*pair)
        assert report.problem is not None
        assert problem in report.problem
        assert report.problem.startswith(f"the {side}")
        assert report.costs is None
    assert model.open_caches == 0


def test_rows_that_depend_on_the_width() -> None:
    model = TableBackend.random(seed=1)
    for shift in (1e-5, 0.1):
        report = last(Shifted(model, shift), model)
        assert report.problem is None
        assert {one.width for one in report.stability} == {2, 5, 9}
        assert all(one.difference == pytest.approx(shift, rel=0.1) for one in report.stability)
        words = "as rounding does" if shift < 1e-3 else "strict=True prevents it"
        assert words in report.verdict[0]
    wrong = last(Shifted(model, 3.0), model)
    assert wrong.problem is not None
    assert "it computes them wrongly" in wrong.verdict[0]


def test_flips_are_counted() -> None:
    table = np.zeros((4, 4, 4))
    table[..., :] = [1.0, 1.1, -2.0, -3.0]
    table[0, 1, 0] = 2.0
    model = Shifted(TableBackend(table), 0.0)
    model.shift = np.array([0.2, 0, 0, 0], np.float32)
    ids = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    (two,) = row_stability(model, ids, widths=(2,), seconds=0.0)
    assert (two.num_rows, two.flips) == (2, 2)
    found = row_stability(model, ids, widths=(5,))
    assert [(one.num_rows, one.flips) for one in found] == [(10, 8)]
    assert row_stability(model, [1], widths=(2, 5)) == []


def test_what_counts_as_rounding() -> None:
    assert rounding_limit({"dtype": "float32"}) == rounding_limit({"dtype": "F32"})
    loose = rounding_limit({"dtype": "bfloat16"})
    assert loose == rounding_limit({}) == rounding_limit({"dtype": "F32", "cache_dtype": "f16"})
    assert loose > rounding_limit({"dtype": "float32", "cache_dtype": "f32"})


def test_text_to_measure_on_is_of_shared_ids() -> None:
    model = TableBackend.random(26, seed=1)
    known = {1, 2, 3}
    assert set(sample_ids(model.vocab, 40, known)) == known
    assert len(sample_ids(model.vocab, 40)) == 40


@pytest.mark.parametrize("context", [1, 2, 3, 8, 20])
def test_short_contexts(context: int) -> None:
    model = TableBackend.random(seed=1, max_context=context)
    long = TableBackend.random(seed=1)
    for pair in ((model, None), (model, long), (long, model)):
        assert last(*pair).problem is None


def run(
    monkeypatch: pytest.MonkeyPatch, target: ModelBackend, draft: ModelBackend | None, *more: str
) -> Result:
    """The command on these two, whatever models are named."""
    monkeypatch.setattr(specdec.cli.check, "open_pair", lambda *_: (target, draft))
    return CliRunner().invoke(app, list(more))


def test_the_tables_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableBackend.random(seed=1)
    draft = model.sibling(0.3, max_context=100)
    good = run(monkeypatch, Slow(Weighty(model), 2.0), Slow(draft, 0.1))
    assert good.exit_code == 0, good.output
    for words in (
        *("8 ids are shared", "contexts: drafting ends after 100 tokens", "2.5 MB", "draft token"),
        *("check 16 drafts", "70 %", "this pair pays from", "best token changed"),
    ):
        assert words in good.stdout
    other = TableBackend(model.table, tokens=[b"[%d]" % i for i in range(8)])
    bad = run(monkeypatch, model, other)
    assert bad.exit_code == 1
    assert "this pair can't work: target and draft have different tokenizers" in bad.stdout
    assert "[0]" in bad.stdout  # as it is, not as markup
    alone = run(monkeypatch, model, None)
    assert alone.exit_code == 0
    assert "there is no draft" in alone.stdout


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableBackend.random(seed=1)
    for draft, code in ((model.sibling(0.3), 0), (NoCrop(model), 1)):
        done = run(monkeypatch, model, draft, "--json")
        printed = json.loads(done.stdout)
        assert done.exit_code == code
        assert (printed["problem"] is None) == (code == 0)
        assert printed["verdict"]
        assert printed["target"]["info"]["runtime"] == "table"
        assert (printed["costs"] is None) == (code == 1)
        assert printed["interrupted"] is False


def test_ctrl_c_leaves_a_partial_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for more in ([], ["--json"]):
        target = TableBackend.random(seed=1)
        target.fail_at, target.fault = 40, KeyboardInterrupt()
        done = run(monkeypatch, target, target.sibling(0.3), *more)
        assert done.exit_code == 130
        assert "interrupted" in done.stderr
        if more:
            printed = json.loads(done.stdout)
            assert printed["interrupted"] is True
            assert printed["num_shared"] == 8
            assert printed["costs"] is None
        else:
            assert "8 ids are shared" in done.stdout
        assert target.open_caches == 0


def test_models_of_every_mix(one_thread: None, tiny_llama: Any, tiny_draft: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    pairs = [
        *((tiny_llama.folder, draft) for draft in (tiny_draft.folder, tiny_draft.gguf)),
        *((tiny_llama.gguf, draft) for draft in (tiny_draft.folder, tiny_draft.gguf)),
        *((tiny_llama.folder, draft) for draft in ("self", "none")),
    ]
    for target, draft in pairs:
        options = ["--target-model", str(target), "--draft-model", str(draft), "--n-threads", "1"]
        done = CliRunner().invoke(app, [*options, "--json"])
        assert done.exit_code == 0, done.output
        printed = json.loads(done.stdout.splitlines()[-1])
        assert printed["problem"] is None
        assert printed["costs"]["plain_ms"] > 0
        assert (printed["costs"]["draft_ms"] is None) == (draft == "none")
        assert len(printed["stability"]) == 3
