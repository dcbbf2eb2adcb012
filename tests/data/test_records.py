"""Rows of JSONL and Parquet files: each is read or named."""

import gzip
import json

import pytest

from areal_jax.data.records import Record, data_files, read_records
from areal_jax.data.rows import BadRow, RowsError


def test_lines_are_counted_and_bad_ones_are_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": "x\xe2\x80\xa8y"}\n[1]\n{"a": \n\xff{}\n')
    read = list(read_records(file))
    assert [r.row for r in read if isinstance(r, Record)] == [{"a": 1}, {"a": "x\u2028y"}]
    assert [r.line for r in read] == [1, 3, 4, 5, 6] and read[1].where == f"{file}:3"
    reasons = [str(r) for r in read if isinstance(r, BadRow)]
    for reason, part in zip(
        reasons, (":4: a row must be a JSON object; got list", ":5: a row must be JSON", ":6: a row must be UTF-8 text; byte 0xff"), strict=True
    ):
        assert part in reason


def test_a_directory_is_its_files_by_name(tmp_path):
    for name, value in (("b.jsonl", 2), ("a.jsonl", 1), ("readme.md", 3)):
        (tmp_path / name).write_text(json.dumps({"v": value}))
    assert [r.row["v"] for r in read_records(tmp_path)] == [1, 2]
    (tmp_path / "empty").mkdir()
    for path, part in (("empty", "holds none"), ("absent.jsonl", "is not there"), ("readme.md", r"must end in \.jsonl or \.parquet")):
        with pytest.raises(RowsError, match=part):
            data_files(tmp_path / path)


@pytest.mark.parametrize(
    "content, part", [(gzip.compress(b"{}", mtime=0), "gunzip"), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b' [{"a": 1}]', "jq")]
)
def test_other_formats_are_refused(tmp_path, content, part):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(RowsError, match=part):
        list(read_records(tmp_path / "rows.jsonl"))


def test_parquet_rows_are_those_of_jsonl(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "é"}], "n": i} for i in range(1500)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
    read = list(read_records(tmp_path / "rows.parquet"))
    assert [r.row for r in read] == rows and (read[0].line, read[-1].line) == (1, 1500)
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(data[:-100])
    with pytest.raises(RowsError, match=r"torn\.parquet' must be a whole Parquet file"):
        list(read_records(tmp_path / "torn.parquet"))


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RowsError, match=r"pip install 'areal_jax\[parquet\]'"):
        list(read_records(tmp_path / "rows.parquet"))
