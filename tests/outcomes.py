"""Two hooks of pytest for checks of a GPU: what one found is told at once, beside its outcome."""

from typing import Any

import pytest


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """With -v: the figures that a check recorded, or why it failed, for its process may not live to
    its end, where pytest tells it."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        found = crash.message if crash else report.longreprtext
        return "failed", "F", f"FAILED, {' '.join(found.split())[:300]}"
    if report.when != "call" or not report.passed:
        return None
    figures = "".join(f", {name} {value}" for name, value in report.user_properties)
    return "passed", ".", f"PASSED in {report.duration:.1f} s{figures}"


def pytest_exception_interact(node: Any, call: pytest.CallInfo) -> None:
    """After an error of CUDA's all else that this process does fails, too: it ends here."""
    if "CUDA error" in str(call.excinfo):
        node.session.shouldstop = "an error of CUDA's"
