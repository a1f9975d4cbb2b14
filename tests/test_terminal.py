"""Printed tables: they fit the terminal, no number is broken, and nothing is lost."""

from __future__ import annotations

import io
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from kindred.server_app.terminal import Column, number, print_table, texts

KINDRED = str(Path(sysconfig.get_path("scripts")) / "kindred")
HEADS = ("best %", "bottom decile %", "thousand samples trained", "better : worse : equal", "seconds")


def printed(columns, lines, width: int | None, ruled: bool = True) -> str:
    file = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        if width is not None:
            patch.setenv("COLUMNS", str(width))
        print_table(columns, lines, file, ruled)
    return file.getvalue()


cells = st.floats(0, 1e6).map("{:.1f}".format) | st.tuples(*[st.integers(0, 99)] * 3).map(
    "{0[0]} : {0[1]} : {0[2]}".format
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.tuples(*[cells] * len(HEADS)), min_size=1, max_size=4),
    width=st.integers(40, 140),
    ruled=st.booleans(),
)
def test_every_number_is_whole_and_every_line_fits(lines, width, ruled) -> None:
    named = [(f"method-{i}", *line) for i, line in enumerate(lines)]
    said = printed([Column("strategy"), *map(number, HEADS)], named, width, ruled).splitlines()
    assert max(map(len, said)) <= width
    for line in named:
        for cell in line:
            assert any(cell in each for each in said)
    heads = " ".join(" ".join(said).split())
    assert all(word in heads for head in HEADS for word in head.split())


def test_a_pipe_has_no_width_unless_columns_is_set() -> None:
    columns, lines = texts("preset", "from"), [("fig5", "the practical partition " * 20)]
    assert max(len(line.rstrip()) for line in printed(columns, lines, None).splitlines()) > 400
    narrow = printed(columns, lines, 40)
    assert max(map(len, narrow.splitlines())) == 40 and narrow.count("practical") == 20


def test_what_does_not_fit_becomes_a_record_a_line() -> None:
    columns = [Column("strategy"), *map(number, HEADS)]
    said = printed(columns, [("local", "46.2", "35.8", "1.6", "10 : 2 : 3", "0.5")], 34).splitlines()
    assert [line.rstrip() for line in said] == [
        "strategy", "", "local",
        "  best %                46.2",
        "  bottom decile %       35.8",
        "  thousand samples      1.6",
        "  trained",
        "  better : worse :      10 : 2 : 3",
        "  equal",
        "  seconds               0.5",
        "",
    ]  # fmt: skip


def test_texts_of_users_are_no_markup() -> None:
    assert "[bold]of[/bold]" in printed([Column("class")], [("[bold]of[/bold]",)], None)


@pytest.mark.parametrize("width", [80, 40])
def test_commands_keep_to_the_width(width, tmp_path) -> None:
    def said(*arguments: str) -> list[str]:
        environment = {**os.environ, "COLUMNS": str(width)}
        done = subprocess.run([KINDRED, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    for command in ("presets", "strategies", "datasets"):
        assert max(map(len, said(command))) <= width
    small = ["--clients=4", "--set=samples-per-client=10", "--set=local-epochs=1", "--rounds=1", "--engine=inline"]
    lines = said("compare", "--strategies=local,fedavg", *small, f"--output-dir={tmp_path}")
    title = lines.index("digits, rotated, seed 0")
    table = lines[title + 1 : next(i for i, line in enumerate(lines) if line.startswith("p: Wilcoxon"))]
    assert max(map(len, table)) <= width
    assert {"MB", "both", "ways", "thousand", "trained"} <= set(" ".join(table).split())
