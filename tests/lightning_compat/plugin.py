"""A pytest plugin that puts goose3d into ddp's place, for Lightning's own tests.

Wherever a test asks for ``strategy="ddp"``, and where its Trainer has one CPU and no strategy, it
gets goose3d at tp = pp = 1. The spawned and forked variants get goose3d in forked processes, by
classes that exist here only: it has no such launcher of its own. Registry and choice alone are
changed, so ``DDPStrategy()`` is still ddp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as TrainerLauncher,
)
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy
from tests.lightning_compat.cases import Cases, read_cases

FORKED = ("spawn", "fork", "notebook")


class ForkedFabricStrategy(Goose3DFabricStrategy):
    """goose3d in processes that are forked from the test's own."""

    def _configure_launcher(self) -> None:
        self._launcher = FabricLauncher(self, start_method="fork")


class ForkedStrategy(Goose3DStrategy):
    """The same for the Trainer."""

    def _configure_launcher(self) -> None:
        self._launcher = TrainerLauncher(self, start_method="fork")


class InPlaceOfDDP:
    """Changes the registries and the choice of Lightning, and notes which tests it reached."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases
        self.current = ""
        self.reached: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.built: list[Any] = []

    def install(self) -> None:
        """Replace ddp for this process."""
        classes = {
            False: (Goose3DFabricStrategy, ForkedFabricStrategy),
            True: (Goose3DStrategy, ForkedStrategy),
        }
        for trainer, registry in ((False, STRATEGY_REGISTRY), (True, StrategyRegistry)):
            plain, forked = classes[trainer]
            for name, entry in registry.items():
                if name.startswith("ddp"):
                    chosen = forked if any(word in name for word in FORKED) else plain
                    entry["strategy"] = self._factory(chosen)
        # Lightning's tests wait for this thread, which sleeps for 5 s at a time.
        _ChildProcessObserver.__init__.__defaults__ = (0.05,)
        connector = _AcceleratorConnector
        connector._choose_strategy = self._chooser(connector._choose_strategy)

    def _factory(self, chosen: Callable[..., Any]) -> Callable[..., Any]:
        def build(**_settings_of_ddp: Any) -> Any:
            self.reached.add(self.current)
            self.built.append(chosen())
            return self.built[-1]

        return build

    def _chooser(self, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def chosen(connector: Any) -> Any:
            strategy = choose(connector)
            is_one_cpu = type(strategy).__name__ == "SingleDeviceStrategy" and (
                strategy.root_device.type == "cpu"
            )
            return "ddp" if is_one_cpu else strategy

        return chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Drop the excluded tests; an exclusion that names none is an error."""
        excluded = [item for item in items if self.cases.reason(item.nodeid)]
        if not any("::" in argument for argument in config.args):
            self.cases.check(item.nodeid for item in items)
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if item not in excluded]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Know which test asks for a strategy."""
        self.current = item.nodeid
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Stop the runtimes of the test.

        A test that fails, and Fabric always, ends without a word to the strategy, and Lightning's
        fixtures then find the watchdog's thread.
        """
        while self.built:
            runtime = self.built.pop().runtime
            if runtime.started:
                runtime.stop()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what became of each test."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many tests there were, and how many of them ran with goose3d."""
        passed = {name for name, outcome in self.outcomes.items() if outcome == "passed"}
        failed = sum(outcome == "failed" for outcome in self.outcomes.values())
        terminalreporter.write_line(
            f"goose3d in ddp's place: {len(passed)} passed, {len(passed & self.reached)} of them "
            f"with goose3d, {failed} failed (lightning {pl.__version__})"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Replace ddp before any test is imported."""
    # Theirs is of pytest-rerunfailures, which is not needed here.
    config.addinivalue_line("markers", "flaky: a test that may be tried again")
    plugin = InPlaceOfDDP(read_cases())
    plugin.install()
    config.pluginmanager.register(plugin, "goose3d in ddp's place")
