"""Schemas: how cells become values and values features, the JSON form, and statistics from training rows alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kindred.data import DataError, Task
from kindred.data.inputs import TableInputs
from kindred.data.schema import MISSING, Column, Schema, cell_number, cell_text
from kindred.objectives import Classes, Number

AGE = Column("age", missing=True, mean=50.0, deviation=10.0)
SEX = Column("sex", ("F", "M"))
PAIN = Column("pain", ("none", "some", "strong"), missing=True)
SCHEMA = Schema((AGE, SEX, PAIN), "sick", "hospital")


@pytest.mark.parametrize(
    ("cell", "text"),
    [(" Male ", "Male"), ("true", "TRUE"), ("False", "FALSE"), ("2.0", "2"), ("-3.", "-3"), ("2.5", "2.5"), ("NA", ""),
     (" ? ", ""), ("null", ""), ("NaN", ""), ("a\n b", "a b"), ("x\x1b[31m", "x [31m"), ("Na", "Na")],
)  # fmt: skip
def test_cells_are_texts_in_one_form(cell, text) -> None:
    assert cell_text(cell) == text


@pytest.mark.parametrize("cell", ["", "inf", "nan", "1_000", "1,5", "0x1", "12 mg", "1e999"])
def test_what_is_no_finite_number_is_none(cell) -> None:
    assert cell_number(cell) is None


def test_values_are_numbers_places_of_categories_and_nan() -> None:
    assert AGE.value(" 1e1 ") == 10 and math.isnan(AGE.value("?"))
    assert [SEX.value("F"), SEX.value(" M")] == [0, 1]
    assert SEX.value("male") == 2  # unknown, and not missing
    assert math.isnan(SEX.value(""))
    with pytest.raises(ValueError, match="no number"):
        AGE.value("old")


def test_features_are_standardised_numbers_then_categories_then_missing_cells() -> None:
    x = np.array([[60.0, 1.0, 0.0], [np.nan, 2.0, np.nan], [45.0, 0.0, 3.0]])
    expected = [
        # age   F  M   none some strong   no age, no pain
        [1.0, 0, 1, 1, 0, 0, 0, 0],
        [0.0, 0, 0, 0, 0, 0, 1, 1],
        [-0.5, 1, 0, 0, 0, 0, 0, 0],
    ]
    features = SCHEMA.features(x)
    assert features.tolist() == expected and features.dtype == np.float32
    assert SCHEMA.num_features == 8 and TableInputs(SCHEMA).shape == (8,)
    assert SCHEMA.unknown(x) == {"sex": 1, "pain": 1}
    assert SCHEMA.features(x[:0]).shape == (0, 8)


def test_means_and_deviations_are_those_of_the_given_rows_without_missing_cells() -> None:
    x = np.array([[1.0, 0.0, 0.0], [3.0, 1.0, 1.0], [np.nan, 1.0, 2.0]])
    fitted = SCHEMA.fit(x)
    assert (fitted.columns[0].mean, fitted.columns[0].deviation) == (2.0, 1.0)
    assert fitted.columns[1:] == SCHEMA.columns[1:]
    constant = SCHEMA.fit(np.array([[7.0, 0, 0], [7.0, 0, 0]])).columns[0]
    assert (constant.mean, constant.deviation) == (7.0, 1.0)
    empty = SCHEMA.fit(np.array([[np.nan, 0, 0], [np.nan, 0, 0]])).columns[0]
    assert (empty.mean, empty.deviation) == (0.0, 1.0)


def test_an_array_of_numbers_has_a_schema_of_its_own() -> None:
    schema = Schema.of_numbers(np.array([[1.0, np.nan], [3.0, 4.0]]))
    assert [(each.name, each.type, each.missing) for each in schema.columns] == [
        ("0", "number", False),
        ("1", "number", True),
    ]


@pytest.mark.parametrize("objective", [Classes(2, ("well", "sick")), Number(1, ("cost",), 3.0, 2.0)])
def test_a_task_of_a_table_is_the_same_after_its_json(tmp_path, objective) -> None:
    task = Task(TableInputs(SCHEMA), objective)
    assert Task.from_metadata(task.to_metadata("mlp")) == ("mlp", task)
    (tmp_path / "schema.json").write_text(json.dumps(task.to_dict()))
    assert Task.load(tmp_path / "schema.json") == task
    assert Task.load(tmp_path / "schema.json").fingerprint == task.fingerprint
    other = Task(TableInputs(replace(SCHEMA, columns=(SEX, AGE, PAIN))), objective)
    assert other.fingerprint != task.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about["inputs"].pop("columns"),
        lambda about: about["inputs"].update(columns=[]),
        lambda about: about["inputs"]["columns"][0].update(deviation=0),
        lambda about: about["inputs"]["columns"][0].update(mean="1"),
        lambda about: about["inputs"]["columns"][0].update(type="category"),
        lambda about: about["inputs"]["columns"][0].update(name=3),
        lambda about: about["inputs"]["columns"][0].update(name="sex"),
        lambda about: about["inputs"]["columns"][1].update(categories=["F", "F"]),
        lambda about: about["inputs"]["columns"][1].update(colour="red"),
        lambda about: about["inputs"].update(kind="chairs"),
        lambda about: about["inputs"].update(target=3),
        lambda about: about.update(objective={"objective": "classes", "num_outputs": 1}),
        lambda about: about.update(inputs=[]),
    ],
)
def test_a_schema_file_that_is_none_is_refused_in_one_line(tmp_path, change) -> None:
    about = Task(TableInputs(SCHEMA), Classes(2)).to_dict()
    about = json.loads(json.dumps(about))
    change(about)
    (tmp_path / "schema.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"schema.json cannot be read as a schema") as caught:
        Task.load(tmp_path / "schema.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 100_000, "\xff"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content) -> None:
    (tmp_path / "schema.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot be read as a schema"):
        Task.load(tmp_path / "schema.json")


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="3 columns"):
        SCHEMA.features(np.zeros((2, 4)))
    with pytest.raises(DataError, match="a number beyond 1e"):
        SCHEMA.features(np.full((2, 3), np.inf))
    for code in (4, -1, 0.5):
        with pytest.raises(DataError, match=rf"column 'pain' has {code}, allowed: .* 0 to 2; 3 for an unknown one"):
            SCHEMA.features(np.array([[60.0, 1.0, code]]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.sampled_from(sorted(MISSING)), st.floats(-1e6, 1e6).map(str)),
            st.text(max_size=3),
            st.sampled_from(["none", "strong", "", "awful"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_row_has_finite_features_of_which_at_most_one_category_is_1(rows) -> None:
    x = np.array([[column.value(cell) for column, cell in zip(SCHEMA.columns, row, strict=True)] for row in rows])
    features = SCHEMA.fit(x).features(x)
    assert features.shape == (len(rows), 8) and np.isfinite(features).all()
    assert set(np.unique(features[:, 1:])) <= {0, 1}
    assert (features[:, 1:3].sum(axis=1) <= 1).all() and (features[:, 3:6].sum(axis=1) <= 1).all()
    assert (features[:, 6] == np.isnan(x[:, 0])).all()
