"""The dataset csv: what is inferred of columns and targets, whose rows are whose, and what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kindred.data import DataError, Task
from kindred.data.csv_files import read_csv
from kindred.data.inputs import TableInputs
from kindred.data.schema import Column, Schema
from kindred.data.sites import empty_cells, far_numbers, read_site
from kindred.objectives import Classes, Labels, Number

from .refusals import refusal

HEART = """id,age,sex,dataset,chol,fbs,num
7,63,Male,Cleveland,233,TRUE,0
9,67,Female,Cleveland,,false,2
4,37,Male,Hungary,250,,1
8,41,Male,Hungary,0,FALSE,0
"""


def written(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding)
    return str(path)


def columns(**cells: list[object]) -> str:
    """Return the text of a table with these columns."""
    rows = zip(*cells.values(), strict=True)
    return "\n".join([",".join(cells), *(",".join(map(str, row)) for row in rows)]) + "\n"


def test_a_table_as_people_have_it_becomes_a_dataset(tmp_path) -> None:
    found = read_csv(written(tmp_path / "heart.csv", HEART), "num>0", "dataset")
    assert [(each.name, each.categories, each.missing) for each in found.schema.columns] == [
        ("age", (), False),
        ("sex", ("Female", "Male"), False),
        ("chol", (), True),
        ("fbs", ("FALSE", "TRUE"), True),
    ]
    assert np.array_equal(
        found.x_train,
        [[63, 1, 233, 1], [67, 0, np.nan, 0], [37, 1, 250, np.nan], [41, 1, 0, 0]],
        equal_nan=True,
    )
    assert found.objective == Classes(2, ("not num>0", "num>0")) and found.y_train.tolist() == [0, 1, 1, 0]
    assert found.y_train.dtype == np.int64 and found.kind == "table"
    assert found.clients_train.tolist() == ["Cleveland", "Cleveland", "Hungary", "Hungary"]
    assert len(found.x_test) == len(found.y_test) == 0 and found.clients_test is None
    assert found.remarks == ("column 'id' is not used: its name says that it identifies rows",)


@pytest.mark.parametrize(
    ("cells", "target", "objective", "y"),
    [
        (["b", "a", "b"], "t", Classes(2, ("a", "b")), [1, 0, 1]),
        (["True", "FALSE", "true"], "t", Classes(2, ("FALSE", "TRUE")), [1, 0, 1]),
        ([0, 1, 1.0], "t", Classes(2, ("0", "1")), [0, 1, 1]),
        ([0.5, 1.5, 0.5], "t", Classes(2, ("0.5", "1.5")), [0, 1, 0]),
        ([2, 10, 3], "t", Classes(3, ("2", "3", "10")), [0, 2, 1]),
        ([2.5, 10, 3], "t", Number(1, ("t",)), [2.5, 10, 3]),
        ([2, 10, 3], "t>=3", Classes(2, ("not t>=3", "t>=3")), [0, 1, 1]),
        ([2, 10, 3], "t < 3", Classes(2, ("not t<3", "t<3")), [1, 0, 0]),
        ([2, "2.0", 3], "t==2", Classes(2, ("not t==2", "t==2")), [1, 1, 0]),
        (["a", "b", "c"], "t==b", Classes(2, ("not t==b", "t==b")), [0, 1, 0]),
    ],
)
def test_the_target_decides_the_objective(tmp_path, cells, target, objective, y) -> None:
    found = read_csv(written(tmp_path / "a.csv", columns(x=[1, 5, 2], t=cells)), target)
    assert found.objective == objective and found.y_train.tolist() == y


def test_many_whole_numbers_are_a_number_and_the_task_overrides(tmp_path) -> None:
    file = written(tmp_path / "a.csv", columns(x=[k % 7 for k in range(30)], t=[k // 2 * 2 for k in range(30)]))
    assert read_csv(file, "t").objective.num_outputs == 15
    assert read_csv(file, "t", task="number").objective == Number(1, ("t",))
    file = written(tmp_path / "b.csv", columns(x=[k % 7 for k in range(30)], t=range(30)))
    assert read_csv(file, "t").objective == Number(1, ("t",))
    assert read_csv(file, "t", task="classes").objective.num_outputs == 30


def test_several_columns_are_labels(tmp_path) -> None:
    found = read_csv(
        written(tmp_path / "a.csv", columns(x=[1, 5, 2], a=[0, 1, 1], b=["FALSE", "true", "false"])), "a, b"
    )
    assert found.objective == Labels(2, ("a", "b")) and found.y_train.tolist() == [[0, 0], [1, 1], [1, 0]]
    text = refusal(lambda: read_csv(written(tmp_path / "b.csv", columns(x=[1, 5], a=[0, 2], b=[0, 1])), "a,b"))
    assert "b.csv: row 3, column a: '2'" in text and "0 or 1" in text


def test_rows_without_a_target_are_counted_and_not_used(tmp_path) -> None:
    found = read_csv(written(tmp_path / "a.csv", columns(x=[1, 5, 2, 9], t=["a", "", "b", "?"])), "t")
    assert found.x_train.ravel().tolist() == [1, 2] and found.remarks == (
        "rows without a target, which are not used: 2",
    )


def test_a_folder_has_a_file_for_each_client(tmp_path) -> None:
    for name, ages in (("oslo", [30, 31]), ("lyon", [50, 51, 52])):
        written(tmp_path / f"{name}.csv", columns(age=ages, sick=[k % 2 for k in range(len(ages))]))
    written(tmp_path / ".hidden.csv", "no table")
    found = read_csv(str(tmp_path), "sick")
    assert found.clients_train.tolist() == ["lyon"] * 3 + ["oslo"] * 2
    assert found.x_train.ravel().tolist() == [50, 51, 52, 30, 31]


def test_a_folder_with_train_and_test_has_both(tmp_path) -> None:
    written(tmp_path / "train.csv", columns(age=[1, 2, 3], sex=["F", "M", "F"], sick=[0, 1, 1], who=["a", "b", "b"]))
    written(tmp_path / "test.csv", columns(who=["b"], sick=[1], age=[9], sex=["D"]))  # in another order
    found = read_csv(str(tmp_path), "sick", "who")
    assert found.x_test.tolist() == [[9, 0]] and found.y_test.tolist() == [1]
    assert found.schema.columns[1].categories == ("D", "F", "M")
    assert found.clients_train.tolist() == ["a", "b", "b"] and found.clients_test.tolist() == ["b"]


def test_times_are_numbers_and_no_inputs(tmp_path) -> None:
    found = read_csv(written(tmp_path / "a.csv", columns(x=[1, 5, 2], t=[0, 1, 1], day=[3, 1.5, 2])), "t", time="day")
    assert found.times.tolist() == [3, 1.5, 2] and [each.name for each in found.schema.columns] == ["x"]


def test_spreadsheets_with_semicolons_and_a_byte_order_mark_are_read(tmp_path) -> None:
    text = "\ufeffage;sick;note, with comma\n1;a;x\n\n2;b;y\n"
    found = read_csv(written(tmp_path / "a.csv", text), "sick")
    assert [each.name for each in found.schema.columns] == ["age", "note, with comma"] and len(found.x_train) == 2


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["v"] * 40, "all its cells are v"),
        ([""] * 40, "all its cells are empty"),
        ([f"name {k}" for k in range(40)], "40 different texts in 40 rows"),
        (range(1, 41), "it numbers the rows"),
    ],
)
def test_columns_that_say_nothing_are_named_and_not_used(tmp_path, cells, reason) -> None:
    text = columns(x=[k * k for k in range(40)], column=cells, t=[k % 2 for k in range(40)])
    found = read_csv(written(tmp_path / "a.csv", text), "t")
    assert [each.name for each in found.schema.columns] == ["x"]
    (remark,) = found.remarks
    assert remark.startswith("column 'column' is not used: ") and reason in remark


def test_a_column_of_one_value_and_empty_cells_says_something(tmp_path) -> None:
    found = read_csv(written(tmp_path / "a.csv", columns(smoker=["yes", "", "yes"], t=["a", "b", "a"])), "t")
    assert found.schema.num_features == 2 and found.remarks == ()


def test_a_text_among_numbers_is_named_by_file_row_column_and_value(tmp_path) -> None:
    cells = [k * 1.5 for k in range(8000)]
    cells[7011] = "high"
    file = written(tmp_path / "a.csv", columns(chol=cells, t=[k % 2 for k in range(8000)]))
    text = refusal(lambda: read_csv(file, "t"))
    assert "a.csv: row 7,013, column chol: 'high'" in text and "7,999 of the column's 8,000" in text


def edited(path: Path, old: str, new: str) -> str:
    assert old in HEART
    return written(path / "heart.csv", HEART.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "given", "words"),
    [
        ("id", "id", {"target": "disease"}, ["heart.csv", "no column 'disease'", "age, sex"]),
        ("id", "id", {"target": ""}, ["heart.csv", "target is not set"]),
        ("id", "id", {"target": "num>few"}, ["num>few", "a number"]),
        ("id", "id", {"target": "sex>0"}, ["row 2", "column sex", "'Male'", "a number"]),
        ("id", "id", {"target": "num>5"}, ["'num>5'", "one class", "not num>5"]),
        ("id", "id", {"target": "num>0", "task": "number"}, ["num>0", "number"]),
        ("id", "id", {"target": "num", "task": "spells"}, ["spells", "auto, classes"]),
        ("id", "id", {"target": "num,age", "task": "classes"}, ["num,age", "2 columns"]),
        ("id", "id", {"target": "num,age", "task": "number"}, ["num,age", "task number"]),
        ("id", "id", {"target": "sex", "task": "number"}, ["row 2, column sex: 'Male'", "a number"]),
        ("id", "id", {"target": "num", "client": "hospital"}, ["no column 'hospital'", "the client"]),
        ("id", "id", {"target": "num", "time": "year"}, ["no column 'year'", "the time"]),
        ("id", "id", {"target": "num", "time": "num"}, ["time is 'num'", "a target"]),
        ("id", "id", {"target": "dataset"}, ["client is 'dataset'", "a target"]),
        ("id", "id", {"time": "dataset"}, ["client and time are 'dataset'"]),
        ("id", "id", {"target": "num", "time": "sex"}, ["row 2", "column sex", "'Male'", "a number"]),
        ("8,41,Male,Hungary", "8,41,Male,", {}, ["row 5", "column dataset", "''", "name of a client"]),
        ("9,67,Female", "9,67,x,Female", {}, ["row 3 has 8 cells", "header 7"]),
        ("fbs", "age", {}, ["'age'", "header"]),
        ("id,age,sex,dataset,chol,fbs,num\n", "", {}, ["no column 'num'", "its columns: 7, 63, Male"]),
        ("id,age,sex,dataset,chol,fbs,num\n7,63", "7,6.3", {}, ["header", "'6.3'"]),
        (HEART[HEART.index("\n") :], "\n", {}, ["heart.csv", "no rows"]),
        (HEART, "", {}, ["header"]),
        ("63,Male", "2021-03-04,Male", {}, []),
        ("Male", '"Ma', {}, ["heart.csv"]),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, old, new, given, words) -> None:
    arguments = {"target": "num>0", "client": "dataset"} | given
    if not words:  # one date among numbers makes neither a column of dates nor one of numbers
        assert read_csv(edited(tmp_path, old, new), **arguments).schema.columns[0].type == "category"
        return
    text = refusal(lambda: read_csv(edited(tmp_path, old, new), **arguments))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "day",
    [
        "2021-03-{}", "{}/03/2021", "{}.3.21", "2021-03-{}T10:00", "10:{}", "{}. 3. 2021", "{}-MAR-2021",
        "{} März 2021", "{}. mars 21", "Mar {} 2021", "2021-03", "03/2021", "1:{} PM", "10:{} a.m.",
    ],
)  # fmt: skip
def test_a_column_of_dates_is_refused_by_name(tmp_path, day) -> None:
    cells = [day.format(f"{k:02}") for k in range(1, 20)]
    file = written(tmp_path / "a.csv", columns(admitted=cells, t=[k % 2 for k in range(19)]))
    text = refusal(lambda: read_csv(file, "t"))
    assert "'admitted'" in text and "dates" in text and cells[0] in text


def test_a_target_of_one_value_is_refused(tmp_path) -> None:
    file = written(tmp_path / "a.csv", columns(x=[1, 2], t=["a", "a"]))
    assert "'t' has one value, 'a'" in refusal(lambda: read_csv(file, "t"))


def test_files_that_are_not_there_are_refused(tmp_path) -> None:
    assert "data-dir is not set" in refusal(lambda: read_csv("", "t"))
    assert "does not exist" in refusal(lambda: read_csv(str(tmp_path / "no.csv"), "t"))
    assert "no CSV files" in refusal(lambda: read_csv(str(tmp_path), "t"))
    written(tmp_path / "a.csv", columns(x=[1, 2], t=["a", "b"]))
    written(tmp_path / "b.csv", columns(y=[1, 2], t=["a", "b"]))
    assert "b.csv has no column 'x'" in refusal(lambda: read_csv(str(tmp_path), "t"))
    (tmp_path / "c").mkdir()
    written(tmp_path / "c" / "a.csv", "x,t\né,1\n", "latin-1")
    assert "a.csv cannot be read" in refusal(lambda: read_csv(str(tmp_path / "c"), "t"))


def test_a_given_schema_decides_columns_categories_and_target(tmp_path) -> None:
    found = read_csv(written(tmp_path / "heart.csv", HEART), "num>0", "dataset")
    task = Task(TableInputs(found.schema.fit(found.x_train)), found.objective)
    written(tmp_path / "schema.json", json.dumps(task.to_dict()))
    other = written(tmp_path / "other.csv", HEART.replace("Female", "Diverse"))
    again = read_csv(other, schema=str(tmp_path / "schema.json"))
    assert again.objective == task.objective and again.schema == task.inputs.schema
    assert again.x_train[:, 1].tolist() == [1, 2, 1, 1]
    assert again.remarks == ("column 'sex': 1 of 4 cells have a category that the schema does not have",)
    bad = written(tmp_path / "bad.csv", HEART.replace("250", "much"))
    text = refusal(lambda: read_csv(bad, schema=str(tmp_path / "schema.json")))
    assert "bad.csv: row 4, column chol: 'much', allowed: a number" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "age>50"}, "target is 'age>50', allowed with this schema: num>0"),
        ({"task": "number"}, "task is 'number', allowed with this schema: 'auto' or 'classes'"),
        ({"client": "sex"}, "client is 'sex', which is an input in this schema"),
        ({"time": "age"}, "time is 'age', which is an input in this schema"),
    ],
)
def test_settings_that_differ_from_a_given_schema_are_refused(tmp_path, given, words) -> None:
    heart, schema = written(tmp_path / "heart.csv", HEART), tmp_path / "schema.json"
    found = read_csv(heart, "num>0", "dataset")
    written(schema, json.dumps(Task(TableInputs(found.schema), found.objective).to_dict()))
    assert len(read_csv(heart, "num > 0", "dataset", task="classes", schema=str(schema)).x_train) == 4
    assert words in refusal(lambda: read_csv(heart, **given, schema=str(schema)))


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ('x,t\n1,a\n"2,b\n3,a\n', 3),
        ('x,t\n1,a\n2,"b\n3,a\n', 3),
        ('x,note,t\n1,"open,a\n2,ok,b\n3,"open,a\n4,ok,b\n', 2),
    ],
)
def test_a_quote_that_is_not_closed_takes_in_no_row_silently(tmp_path, lines, row) -> None:
    text = refusal(lambda: read_csv(written(tmp_path / "a.csv", lines), "t"))
    assert f"a.csv cannot be read: row {row} has a quote that is not closed, or text after it" in text


@pytest.mark.parametrize("number", ["{},5", "1,{}00", "-{},50"])
def test_numbers_with_commas_are_neither_categories_nor_classes(tmp_path, number) -> None:
    cells = [number.format(k) for k in range(10, 30)]
    for target in ("t", "cost"):
        rows = "".join(f"{cell};{k % 2}\n" for k, cell in enumerate(cells))
        file = written(tmp_path / "a.csv", f"cost;t\n{rows}")
        text = refusal(lambda target=target, file=file: read_csv(file, target))
        assert f"row 2, column cost: '{cells[0]}'" in text and "have commas, for decimals or thousands" in text


def test_a_column_of_numbers_and_many_texts_is_named(tmp_path) -> None:
    cells = [*range(30, 36), *range(30, 36), *range(30, 36), "<30", "<30"]
    found = read_csv(written(tmp_path / "a.csv", columns(temp=cells, t=[k % 2 for k in range(20)])), "t")
    assert found.schema.columns[0].type == "category"
    (remark,) = found.remarks
    assert remark.startswith("column 'temp' is one of categories, though 18 of its 20 cells are numbers: ")
    assert "row 20, column temp: '<30'" in remark


def test_empty_cells_in_a_column_of_a_schema_without_any_are_counted(tmp_path) -> None:
    found = read_csv(written(tmp_path / "heart.csv", HEART), "num>0", "dataset")
    task = Task(TableInputs(found.schema.fit(found.x_train)), found.objective)
    written(tmp_path / "schema.json", json.dumps(task.to_dict()))
    (column,) = [each for each in found.schema.columns if each.name == "age"]
    assert not column.missing
    age = HEART.splitlines()[1].split(",")[HEART.splitlines()[0].split(",").index("age")]
    again = read_csv(written(tmp_path / "b.csv", HEART.replace(age, "", 1)), schema=str(tmp_path / "schema.json"))
    assert again.remarks == ()
    assert empty_cells(again) == ["column 'age': 1 of 4 cells are empty, and the schema says that none may be"]


def test_numbers_far_from_those_of_the_schema_are_named(tmp_path) -> None:
    sample = read_csv(written(tmp_path / "a.csv", columns(height=[150, 160, 170, 180], t=[0, 1, 0, 1])), "t")
    height = replace(sample.schema.columns[0], mean=165.0, deviation=10.0)
    task = Task(TableInputs(replace(sample.schema, columns=(height,))), sample.objective)
    for heights, lines in ((["134", "136"], []), (["134", ""], ["134", "3.1"]), (["1.65", "1.75"], ["1.7", "16.3"])):
        written(tmp_path / "site.csv", columns(height=heights, t=[0, 1]))
        found = far_numbers(read_site(tmp_path / "site.csv", task=task))
        expected = [f"column 'height': the median is {lines[0]}, {lines[1]} deviations from the schema's mean of 165; "
                    "is it in another unit?"] if lines else []  # fmt: skip
        assert found == expected


def test_a_schema_of_a_file_keeps_its_means_and_deviations(tmp_path) -> None:
    rows = columns(height=[150, 160, 170, 180], t=[0.0, 1.5, 0.5, 2.0])
    sample = read_csv(written(tmp_path / "a.csv", rows), "t")
    column = replace(sample.schema.columns[0], mean=100.0, deviation=50.0)
    objective = replace(sample.objective, mean=1.0, deviation=4.0)
    task = Task(TableInputs(replace(sample.schema, columns=(column,))), objective)
    written(tmp_path / "schema.json", json.dumps(task.to_dict()))
    again = read_csv(tmp_path / "a.csv", schema=str(tmp_path / "schema.json"))
    fitted = Task.fitted(again, again.x_train, again.y_train)
    assert fitted == task
    assert np.allclose(fitted.prepared(again.x_train), [[1.0], [1.2], [1.4], [1.6]])


def test_a_column_without_a_name_is_not_used_and_a_line_says_so(tmp_path) -> None:
    found = read_csv(written(tmp_path / "a.csv", ",x,t\n5,1,a\n4,2,b\n"), "t")
    assert [each.name for each in found.schema.columns] == ["x"]
    assert found.remarks == ("column '' is not used: it has no name",)


def test_delimiters_inside_quotes_do_not_count(tmp_path) -> None:
    found = read_csv(written(tmp_path / "a.csv", '"height, cm";"weight, kg, at a visit";t\n1;2;a\n3;4;b\n'), "t")
    assert [each.name for each in found.schema.columns] == ["height, cm", "weight, kg, at a visit"]


def test_numbers_whose_squares_overflow_are_refused_or_standardised(tmp_path) -> None:
    cells = [k * 1.5 for k in range(100)]
    text = columns(chol=[*cells[:-1], 1e31], t=[k % 2 for k in range(100)])
    assert "column chol: '1e+31', allowed: a number" in refusal(
        lambda: read_csv(written(tmp_path / "a.csv", text), "t")
    )
    few = written(tmp_path / "few.csv", columns(x=[1, 2, 1e31], t=["a", "b", "a"]))
    assert "row 4, column x: '1e+31', allowed: a number from -1e+30 to 1e+30" in refusal(lambda: read_csv(few, "t"))
    large = Schema((Column("x"),)).fit(np.array([[1e30], [-1e30], [0.0]]))
    assert np.isfinite(large.features(np.array([[1e30], [2e29]]))).all()
    small = Schema((Column("x"),)).fit(np.array([[1e-20], [-1e-20]]))
    with pytest.raises(DataError, match="column 'x' has 1e\\+25, too many deviations"):
        small.features(np.array([[0.0], [1e25]]))


CELL = st.one_of(
    st.text(max_size=6), st.sampled_from(["", "1", "2.5", "a", "TRUE", "2020-01-01", "1e400", "\x00", '"'])
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=6),
    target=st.sampled_from(["a", "a>1", "b", "a,b", "x==", ">", ""]),
    encoding=st.sampled_from(["utf-8", "utf-16"]),
)
def test_any_file_is_a_dataset_or_refused_in_one_line(tmp_path, rows, target, encoding) -> None:
    text = "\n".join(["a,b,c", *(",".join(row) for row in rows)])
    (tmp_path / "a.csv").write_bytes(text.encode(encoding, "surrogatepass"))
    try:
        found = read_csv(str(tmp_path / "a.csv"), target)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        found.objective.check(found.y_train)
        assert np.isfinite(found.schema.fit(found.x_train).features(found.x_train)).all()


def test_a_table_may_have_clients_and_times(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,t,who,day\n1,0,b,3\n5,1,a,1.5\n2,1,b,2\n")
    found = read_csv(path, "t", client="who", time="day")
    assert found.times.tolist() == [3, 1.5, 2] and found.clients_train.tolist() == ["b", "a", "b"]
