"""What is called a draft, and what it becomes."""

import pytest

from specdec import CompositeDrafter, ModelDrafter, PromptLookupDrafter, SuffixDrafter
from specdec.named import LOOKUPS, drafter_for, named_lookups
from specdec.testing import TableBackend


@pytest.mark.parametrize(
    ("name", "kinds", "rest"),
    [
        ("suffix", [SuffixDrafter], None),
        ("lookup", [PromptLookupDrafter], None),
        ("suffix+self:q8_0", [SuffixDrafter], "self:q8_0"),
        ("lookup+a+b.gguf", [PromptLookupDrafter], "a+b.gguf"),
        ("suffix+lookup", [*LOOKUPS.values()][::-1], None),
        ("suffixes/model.gguf", [], "suffixes/model.gguf"),
        ("self", [], "self"),
    ],
)
def test_names(name: str, kinds: list[type], rest: str | None) -> None:
    lookups, found = named_lookups(name)
    assert ([type(lookup) for lookup in lookups], found) == (kinds, rest)


def test_one_drafter_comes_of_whatever_is_given() -> None:
    target = TableBackend.random(4)
    lookup = PromptLookupDrafter()
    assert isinstance(drafter_for(target, target, keep_caches=0), ModelDrafter)
    alone = drafter_for(target, lookup, keep_caches=0)
    assert isinstance(alone, CompositeDrafter)
    assert alone.drafters == (lookup,)
    several = drafter_for(target, ["suffix+lookup", target], keep_caches=0)
    assert isinstance(several, CompositeDrafter)
    kinds = [type(drafter) for drafter in several.drafters]
    assert kinds == [SuffixDrafter, PromptLookupDrafter, ModelDrafter]
    assert drafter_for(target, several, keep_caches=0) is several
