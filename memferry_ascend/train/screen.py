"""What a person sees while a run goes: a bar in a terminal, plain lines elsewhere, nothing under --json."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from memferry_ascend import sizes
from memferry_ascend.train.metrics import Record

_LINES = 20  # about so many progress lines a run, without a terminal


class Screen:
    """Shows a run of `steps` steps, of which `done` are behind it."""

    def __init__(self, steps: int, done: int, *, quiet: bool) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, note="")

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line of text."""
        self.console.print(text, markup=False)

    def step(self, record: Record) -> None:
        """A step is done."""
        note = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        if "held_out" in record:
            note += f"  held-out {record['held_out']:.3f}"
        self._bar.update(self._task, completed=record["step"], note=note)
        last = record["step"] == self._steps
        if not self.console.is_terminal and (
            record["step"] % self._every == 0 or last or "held_out" in record
        ):
            self.say(f"step {record['step']}/{self._steps}  {note}")

    def memory(self, report: list[tuple[str, str, int]]) -> None:
        """Where every byte lives."""
        table = Table("where", "what", title="memory", title_justify="left")
        table.add_column("size", justify="right")
        for place, what, nbytes in report:
            table.add_row(place, what, sizes.fmt(nbytes))
        self.console.print(table)

    def plan(self, plan: Any) -> None:
        """The plan's own table."""
        self.say(str(plan))
