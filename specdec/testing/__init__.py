"""For the tests of backends, drafters and whatever uses them.

``TableBackend`` is a complete model of a few kilobytes, exact and instant: the reference for
everything that holds for any backend. ``CHECKS`` tests the clauses of ``ModelBackend``::

    import pytest

    pytest.register_assert_rewrite("specdec.testing")  # for the usual messages

    from specdec.testing import CHECKS
    from my_package import MyBackend

    @pytest.mark.parametrize("check", CHECKS)
    def test_contract(check):
        check(MyBackend("tiny-model"))
"""

from specdec.testing.checks import CHECKS, Check
from specdec.testing.table import TableBackend, VirtualClock

__all__ = ["CHECKS", "Check", "TableBackend", "VirtualClock"]
