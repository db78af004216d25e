"""``specdec bench``: what it measures, how it sums up, and what it shows."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import specdec.cli.bench as command
from specdec import ModelBackend, SpeculativeDecoder, Stats
from specdec.cli.bench import bench
from specdec.cli.cases import Case, as_cases
from specdec.cli.contest import (
    PARTS,
    PLAIN,
    SPECULATIVE,
    Contestant,
    Run,
    by_decoder,
    by_lengths,
    chances_by_position,
    pooled,
    run_contest,
    sweep_points,
)
from specdec.cli.figure import draw_speedups, draw_time
from specdec.cli.results import Report
from specdec.drafters import Draft, Drafter, DraftRequest
from specdec.prompts import KindedPrompt, load_prompts, shipped_prompts
from specdec.testing import TableBackend, VirtualClock
from specdec.vocab import Vocabulary

CASES = [Case(n, ("odd", "even")[n % 2 == 0], f"text {n}", [n, 0, 1] * 8) for n in range(1, 5)]


def timed_pair(draft_cost: float, noise: float = 0.2) -> tuple[TableBackend, TableBackend]:
    """A target that takes a second per forward, and a draft, by one clock."""
    target = TableBackend.random(8, seed=3)
    draft = target.sibling(noise)
    clock = VirtualClock()
    target.clock, target.cost = clock, lambda width: 1.0
    draft.clock, draft.cost = clock, lambda width: draft_cost
    return target, draft


def timed_report(draft_cost: float, num_draft_tokens: int = 4, noise: float = 0.2) -> Report:
    target, draft = timed_pair(draft_cost, noise)
    clock = target.clock
    speculative = SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens, clock=clock)
    contestants = {
        PLAIN: by_decoder(SpeculativeDecoder(target, clock=clock)),
        SPECULATIVE: by_decoder(speculative),
    }
    runs = run_contest(contestants, CASES, max_new_tokens=40, repeats=2, clock=clock)
    return Report(list(runs), CASES)


# What is measured.


def test_all_decode_every_prompt_in_an_order_that_rotates() -> None:
    calls: list[tuple[str, int, int]] = []

    def contestant(name: str) -> Contestant:
        def decode(ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], None]:
            calls.append((name, ids[0], max_new_tokens))
            return [1, 2], None

        return decode

    names = ["a", "b", "c"]
    contest = run_contest(
        {name: contestant(name) for name in names}, CASES, max_new_tokens=40, repeats=3
    )
    assert not calls
    runs = list(contest)
    warm_ups, measured = calls[:3], calls[3:]
    assert [(name, first) for name, first, _ in warm_ups] == [(name, 1) for name in names]
    assert all(max_new_tokens < 40 for *_, max_new_tokens in warm_ups)
    assert Counter(measured) == {(n, c.number, 40): 3 for n in names for c in CASES}
    assert {name for name, *_ in measured[::3]} == set(names)  # each is the first at times
    assert [(run.contestant, run.prompt) for run in runs] == [call[:2] for call in measured]


def test_times_are_those_of_whole_calls() -> None:
    target, _ = timed_pair(0.1)
    clock = target.clock
    contestants = {PLAIN: by_decoder(SpeculativeDecoder(target, clock=clock))}
    (run, *_) = run_contest(contestants, CASES, max_new_tokens=10, clock=clock)
    assert run.seconds == 1 + 10  # the prompt is one forward
    assert run.ms_per_token == pytest.approx(1100)


# How it is summed up.


def test_a_cheap_draft_wins_and_the_figures_are_those_of_the_clock() -> None:
    report = timed_report(draft_cost=0.1)
    plain, stats = report.stats(PLAIN), report.stats(SPECULATIVE)
    assert plain.completion_tokens == stats.completion_tokens == 2 * 4 * 40
    assert report.total.ms_per_token[PLAIN] == pytest.approx(1000 * 41 / 40)
    assert report.total.speedup[PLAIN].median > 1.3
    assert report.total.accept_length == stats.accept_length
    assert report.prices is not None
    assert report.prices.draft == pytest.approx(0.1)
    assert report.prices.verify == pytest.approx(1.0)
    assert report.prices.prefill == pytest.approx(0.1)
    assert sum(report.time.values()) == pytest.approx(1.0)
    assert report.time["rollback"] == report.time["host"] == 0
    assert [kind.kind for kind in report.kinds] == ["odd", "even"]
    for row in (*report.kinds, report.total):
        spread = row.speedup[PLAIN]
        assert spread.low <= spread.median <= spread.high
    assert report.findings()[0].startswith("Faster than plain decoding")
    assert report.findings()[-1] == "The same tokens came out for every prompt."


def test_a_loss_is_explained_by_its_largest_cost() -> None:
    first = timed_report(draft_cost=0.9).findings()[0]
    assert first.startswith("Slower than plain decoding")
    assert "a draft token takes 0.90 of a plain step" in first

    target, draft = timed_pair(0.05, noise=5.0)
    clock = target.clock
    target.cost = lambda width: 0.5 + 0.5 * width  # wide forwards cost the most
    contestants = {
        PLAIN: by_decoder(SpeculativeDecoder(target, clock=clock)),
        SPECULATIVE: by_decoder(SpeculativeDecoder(target, draft, num_draft_tokens=4, clock=clock)),
    }
    runs = list(run_contest(contestants, CASES, max_new_tokens=40, clock=clock))
    first = Report(runs, CASES).findings()[0]
    assert first.startswith("Slower than plain decoding")
    assert "because a target forward takes" in first


def test_a_loss_by_reading_prompts_is_called_so() -> None:
    target, draft = timed_pair(0.1)
    clock = target.clock
    draft.cost = lambda width: 0.1 if width < 3 else 100.0  # prompts are longer than its steps
    cases = [case._replace(ids=[1, 2, 3, 4] * 8) for case in CASES]
    contestants = {
        PLAIN: by_decoder(SpeculativeDecoder(target, clock=clock)),
        SPECULATIVE: by_decoder(SpeculativeDecoder(target, draft, num_draft_tokens=4, clock=clock)),
    }
    runs = list(run_contest(contestants, cases, max_new_tokens=40, clock=clock))
    first = Report(runs, cases).findings()[0]
    assert "because reading a prompt with the draft as well takes 100.0 plain steps" in first
    assert "for answers of 40 tokens" in first


def test_a_drafter_that_never_drafts_is_called_so() -> None:
    class Silent(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft((), reason="it has nothing to say") for _ in requests]

    target, _ = timed_pair(0.1)
    contestants = {
        PLAIN: by_decoder(SpeculativeDecoder(target)),
        SPECULATIVE: by_decoder(SpeculativeDecoder(target, Silent(), num_draft_tokens=3)),
    }
    report = Report(list(run_contest(contestants, CASES, max_new_tokens=5)), CASES)
    assert report.total.accept_rate is None
    assert report.prices is None
    assert report.largest_cost() == "nothing was drafted"
    assert "In 4 of 4 runs it has nothing to say." in report.findings()


def run_of(prompt: int, contestant: str, token_ids: list[int]) -> Run:
    return Run(prompt, CASES[prompt - 1].kind, contestant, 1.0, token_ids, Stats())


def test_the_first_prompt_that_differs_is_named() -> None:
    runs = [
        run_of(1, PLAIN, [1, 2, 3]),
        run_of(1, SPECULATIVE, [1, 2, 3]),
        run_of(2, SPECULATIVE, [1, 2]),
        run_of(2, PLAIN, [1, 2, 3]),
        run_of(3, PLAIN, [1, 2, 3]),
        run_of(3, SPECULATIVE, [4, 2, 3]),
    ]
    report = Report(runs, CASES)
    assert [kind.same_output for kind in report.kinds] == [False, False]
    assert Report(runs[:2], CASES).total.same_output
    assert [(d.prompt, d.contestant, d.position) for d in report.differences] == [
        (2, SPECULATIVE, 2),
        (3, SPECULATIVE, 0),
    ]
    last = report.findings()[-1]
    assert "for 2 of 3 prompts" in last
    assert "parts at token 2 of prompt 2 (even: 'text 2')" in last


@given(st.integers(1, 15))
def test_the_first_runs_alone_make_a_report(count: int) -> None:
    """Ctrl-C may come after any run."""
    runs = timed_report(draft_cost=0.1).runs[:count]
    report = Report(runs, CASES)
    assert report.findings()
    assert json.loads(json.dumps(report.as_dict()))["total"]["num_prompts"] >= 1
    both = {run.prompt for run in runs if run.contestant == PLAIN} & {
        run.prompt for run in runs if run.contestant == SPECULATIVE
    }
    if report.main == SPECULATIVE:
        assert len(report.speedups(PLAIN)) == len(both)


rounds = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda r: (r[0], min(r))))


@given(rounds, rounds)
def test_pooled_statistics_and_acceptance_by_position(
    ones: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    def stats_of(rounds: list[tuple[int, int]]) -> Stats:
        stats = Stats()
        for proposed, correct in rounds:
            stats.count_round(Draft([0] * proposed), correct)
        return stats

    together = pooled([stats_of(ones), stats_of(others)])
    both = ones + others
    assert together == stats_of(both)
    longest = max((proposed for proposed, _ in both), default=0)
    assert chances_by_position(together) == [
        sum(correct >= position for _, correct in both)
        / sum(proposed >= position for proposed, _ in both)
        for position in range(1, longest + 1)
    ]


def test_what_is_predicted_for_fixed_lengths_is_what_happens() -> None:
    target, draft = timed_pair(0.1)
    clock = target.clock
    target.cost = lambda width: 0.8 + 0.2 * width
    decoder = SpeculativeDecoder(target, draft, clock=clock)
    lengths = (0, 1, 2, 4, 8)
    runs = list(run_contest(by_lengths(decoder, lengths, clock=clock), CASES, max_new_tokens=300))
    widths = [length + 1 for length in lengths]
    points = sweep_points(runs, decoder.calibrate([1, 2, 3], widths=widths))
    assert [point.num_draft_tokens for point in points] == list(lengths)
    assert points[0].measured == points[0].predicted == 1.0
    for point in points:
        assert point.predicted == pytest.approx(point.measured, rel=0.1)


# Prompts.


def test_the_shipped_prompts() -> None:
    prompts = shipped_prompts()
    kinds = Counter(kind for kind, _ in prompts)
    assert set(kinds) == {"code", "question", "story", "summary", "translation", "extraction"}
    assert set(kinds.values()) == {4}
    assert len({str(prompt) for _, prompt in prompts}) == 24
    assert len({kind for kind, _ in prompts[:6]}) == 6  # the first few are varied


def test_a_users_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\ufeffOne line\n\n  another: über \n", encoding="utf-8")
    assert load_prompts(file) == [("prompt", "One line"), ("prompt", "another: über")]
    lines = [
        {"kind": "a", "prompt": "1"},
        {"kind": "a", "prompt": [1, 2]},
        {"kind": "b", "prompt": [{"role": "user", "content": "2"}]},
        {"prompt": "3"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [kind for kind, _ in load_prompts(file)] == ["a", "b", "prompt", "a"]
    assert load_prompts(file)[-1].prompt == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "no prompt in it"),
        (b'{"prompt": "a"}\nplain', "line 2 is no JSON"),
        (b'{"prompt": "a"}\n[]', "line 2 is not like"),
        (b'{"text": "a"}', "line 1 is not like"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"", "no prompt in it"),
        *(
            (b'{"prompt": "a"}\n' + b'{"prompt": %s}' % value, "line 2 is not like .* list of ids")
            for value in (
                *(b"5", b"null", b"true", b"[]", b"[1, null]", b"[true]", b"[-1]", b"[[1]]"),
                *(b'["a"]', b'{"a": 1}', b'[{"role": "user"}]', b'[{"content": "a"}]'),
                *(b'[1, {"role": "user", "content": "a"}]', b'"a", "kind": null'),
            )
        ),
        (b'{"prompt": ' + b"[" * 100_000, "line 1 is no JSON .*write"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("line", ["5", "null", '"Write"', "[1, 2]", "[", "Write"])
def test_a_file_that_is_json_by_its_name_holds_objects(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl: line 2 is no.* list of messages"):
        load_prompts(file)


def test_texts_go_through_the_chat_template_if_there_is_one() -> None:
    target = TableBackend.random(8)
    prompts = [KindedPrompt("k", "ab"), KindedPrompt("k", [3, 4])]
    assert [case.ids for case in as_cases(target, prompts)] == [[0, 1], [3, 4]]
    target.vocab = Vocabulary(
        size=8,
        tokens=target.vocab.tokens,
        eos_ids=frozenset(),
        encode=target.vocab.encode,
        encode_chat=lambda messages: [7, len(messages[0]["content"])],
    )
    assert [case.ids for case in as_cases(target, prompts)] == [[7, 2], [3, 4]]


def test_prompts_that_are_too_long_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    target = TableBackend.random(8, max_context=4)
    prompts = [KindedPrompt("k", "abcde"), KindedPrompt("k", "ab")]
    assert [case.number for case in as_cases(target, prompts)] == [2]
    assert "1 prompt left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="all prompts have more tokens"):
        as_cases(target, prompts[:1])
    with pytest.raises(ValueError, match="prompt 1: no tokens of this model spell"):
        as_cases(target, [KindedPrompt("k", "!")])


# The command.


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    lines = [{"kind": "abc"[n % 3], "prompt": [n, 0, 1]} for n in range(1, 7)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [*arguments, "--max-new-tokens", "12"])


def use(monkeypatch: pytest.MonkeyPatch, target: ModelBackend, draft: ModelBackend | None) -> None:
    """Let the command work with these, in place of what it would load."""
    monkeypatch.setattr(command, "open_pair", lambda *_: (target, draft))


def test_shows_a_table_and_says_what_it_means(
    monkeypatch: pytest.MonkeyPatch, prompt_file: str
) -> None:
    use(monkeypatch, *timed_pair(0.1))
    done = invoke("--prompts", prompt_file, "--num-draft-tokens", "3")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    row = {line.split()[0]: line.split() for line in lines if line.split()}
    assert {"a", "b", "c", "all"} <= set(row)
    assert row["a"][-1] == row["all"][-1] == "yes"
    for text in ("6 prompts, up to 12 tokens, K = 3", "plain decoding", "Where the time went"):
        assert text in done.stdout


def test_json_is_one_object_with_every_run(
    monkeypatch: pytest.MonkeyPatch, prompt_file: str
) -> None:
    use(monkeypatch, *timed_pair(0.1))
    done = invoke("--prompts", prompt_file, "--limit", "4", "--repeats", "2", "--json")
    printed = json.loads(done.stdout)
    assert printed["complete"] is True
    assert len(printed["runs"]) == 2 * 4 * 2
    assert {run["contestant"] for run in printed["runs"]} == {PLAIN, SPECULATIVE}
    assert all(len(run["token_ids"]) == 12 for run in printed["runs"])
    assert printed["total"]["same_output"] is True
    assert printed["total"]["speedup"][PLAIN].keys() == {"median", "low", "high"}
    assert set(printed["time"]) == set(PARTS)
    assert printed["target"]["runtime"] == printed["draft"]["runtime"] == "table"
    assert printed["num_draft_tokens"] == "auto"
    assert printed["machine"]["cores"] >= 1


def test_without_a_draft_it_is_plain_only(
    monkeypatch: pytest.MonkeyPatch, prompt_file: str, tmp_path: Path
) -> None:
    use(monkeypatch, TableBackend.random(8), None)
    done = invoke("--prompts", prompt_file)
    assert done.exit_code == 0
    assert "there is no draft" in done.stdout
    assert "accept" not in done.stdout
    done = invoke("--prompts", prompt_file, "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 2
    assert "name a --draft-model" in done.stderr


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("the power went"), 2, "the power")],
)
def test_what_was_measured_before_the_end_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    prompt_file: str,
    fault: BaseException,
    code: int,
    said: str,
) -> None:
    for as_json in (True, False):
        target, draft = timed_pair(0.1)
        target.fault, target.fail_at = fault, 200
        use(monkeypatch, target, draft)
        options = ["--prompts", prompt_file, "--num-draft-tokens", "2"]
        done = invoke(*options, *["--json"] * as_json)
        assert done.exit_code == code
        assert said in done.stderr
        if as_json:
            printed = json.loads(done.stdout)
            assert printed["complete"] is False
            assert 1 <= len(printed["runs"]) < 12
        else:
            assert "all prompts" in done.stdout
        assert target.open_caches == draft.open_caches == 0


def test_an_end_before_the_first_speculative_run_is_called_so(
    monkeypatch: pytest.MonkeyPatch, prompt_file: str
) -> None:
    def contest(*_: Any, **__: Any) -> Iterator[Run]:
        yield run_of(1, PLAIN, [1, 2, 3])
        raise KeyboardInterrupt

    use(monkeypatch, *timed_pair(0.1))
    monkeypatch.setattr(command, "run_contest", contest)
    done = invoke("--prompts", prompt_file)
    assert done.exit_code == 130
    assert "interrupted before speculative decoding ran" in done.stdout
    assert "no draft" not in done.stdout


def test_prompts_that_the_vocabulary_cannot_spell_are_random_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, *timed_pair(0.1))
    done = invoke("--limit", "1", "--json")
    assert done.exit_code == 0, done.output
    assert {run["kind"] for run in json.loads(done.stdout)["runs"]} == {"random ids"}
    assert "random ids stand in for the shipped prompts: prompt 1: no tokens" in done.stderr
    assert invoke("--limit", "1").stdout.count("1 prompt, up to 12 tokens") == 1


def test_an_end_before_the_first_run_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, prompt_file: str
) -> None:
    target, draft = timed_pair(0.1)
    target.fault, target.fail_at = KeyboardInterrupt(), 3
    use(monkeypatch, target, draft)
    done = invoke("--prompts", prompt_file)
    assert (done.exit_code, done.stdout) == (130, "")


def test_the_plot(monkeypatch: pytest.MonkeyPatch, prompt_file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    use(monkeypatch, *timed_pair(0.1))
    picture = tmp_path / "plot.png"
    done = invoke("--prompts", prompt_file, "--plot", str(picture), "--json")
    assert done.exit_code == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    points = json.loads(done.stdout)["lengths"]
    assert [point["num_draft_tokens"] for point in points] == [0, 1, 2, 4, 8]
    assert all(point["measured"] > 0 and point["predicted"] > 0 for point in points)


def test_kinds_may_be_called_as_other_bars_are() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    kinds = ["all", "all prompts", "plain step", "code"]
    cases = [case._replace(kind=kind) for case, kind in zip(CASES, kinds, strict=True)]
    runs = [
        Run(case.number, case.kind, who, 1.0, [1], Stats(completion_tokens=1, target_forward_ct=1))
        for case in cases
        for who in (PLAIN, SPECULATIVE)
    ]
    for draw, more in ((draw_speedups, ["all prompts"]), (draw_time, ["plain step", "all"])):
        axes = Figure().subplots()
        draw(axes, Report(runs, cases))
        assert len({bar.get_extents().y0 for bar in axes.patches}) == len(kinds) + len(more)
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert sorted(names) == sorted(kinds + more)


def test_what_a_plot_needs_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "open_pair", None)
    for path, said in [("a.xyz", "ends in .png"), ("none/a.png", "a folder that is there")]:
        pytest.importorskip("matplotlib")
        done = invoke("--plot", str(tmp_path / path))
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = invoke("--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 2
    assert "extra [bench]" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--num-draft-tokens", "many"),
        ("--num-draft-tokens", "-1"),
        ("--limit", "0"),
        ("--repeats", "0"),
        ("--prompts", "missing"),
        ("--max-new-tokens", "0"),
    ],
)
def test_bad_values_are_refused(monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]) -> None:
    monkeypatch.setattr(command, "open_pair", None)
    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, list(options))
    assert done.exit_code == 2
    assert options[0].lstrip("-").replace("-", "_") in done.output.replace("-", "_")


# Real runtimes.


@pytest.mark.parametrize("target", ["folder", "gguf"])
@pytest.mark.parametrize("draft", ["folder", "gguf", "none"])
def test_every_mix(make_tiny_llama: Any, target: str, draft: str, one_thread: None) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    models = make_tiny_llama(max_context=2048), make_tiny_llama(max_context=2048, noise=0.03)
    drafted = draft != "none"
    options = ["--target-model", str(getattr(models[0], target)), "--n-threads", "1"]
    options += ["--draft-model", str(getattr(models[1], draft)) if drafted else draft]
    done = invoke(*options, "--limit", "2", "--num-draft-tokens", "3", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["total"]["same_output"] is True
    assert len(printed["runs"]) == 2 * (1 + drafted)
    assert (printed["total"]["accept_rate"] is not None) == drafted


@pytest.mark.parametrize("draft", ["folder", "gguf", "none"])
def test_against_transformers(make_tiny_llama: Any, draft: str, one_thread: None) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    models = make_tiny_llama(max_context=2048), make_tiny_llama(max_context=2048, noise=0.03)
    options = ["--target-model", str(models[0].folder), "--device", "cpu", "--limit", "2", "--json"]
    options += [
        "--n-threads",
        "1",
        "--draft-model",
        "none" if draft == "none" else str(getattr(models[1], draft)),
    ]
    done = invoke(*options, "--compare", "transformers")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    kind = "assisted" if draft == "folder" else "prompt lookup"
    assert f"transformers, {kind}" in printed["total"]["ms_per_token"]
    assert f"transformers, {kind}" in printed["total"]["speedup"]
    assert printed["total"]["same_output"] is True


def test_transformers_settings_are_left_alone(tiny_llama: Any, tiny_draft: Any) -> None:
    pytest.importorskip("transformers")
    from specdec.backends import HFBackend
    from specdec_hf.assisted import assisted_generation

    target, draft = HFBackend(tiny_llama.folder), HFBackend(tiny_draft.folder)
    plain = SpeculativeDecoder(target).generate([5, 6, 7], max_new_tokens=30).token_ids
    models = target.model, draft.model
    target.model.generation_config.repetition_penalty = 1.9  # would change the text
    before = [(m.generation_config, m.generation_config.to_dict()) for m in models]
    for assistant in (draft, None):
        assert assisted_generation(target, assistant)([5, 6, 7], 30) == plain
    for model, (config, fields) in zip(models, before, strict=True):
        assert model.generation_config is config
        assert config.to_dict() == fields


def test_transformers_can_only_be_compared_on_its_own_target(
    monkeypatch: pytest.MonkeyPatch, prompt_file: str
) -> None:
    pytest.importorskip("transformers")
    use(monkeypatch, *timed_pair(0.1))
    done = invoke("--prompts", prompt_file, "--compare", "transformers")
    assert done.exit_code == 2
    assert "needs a target in transformers, not TableBackend" in done.stderr
