"""Every format and compression yields the same rows. A bad row is rejected with its line and text,
and the others are read."""

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.ingest.files import bounded, formats
from tasks.ingest.files.formats import Record, Rejection, records
from tasks.ingest.reading import rows
from tests.ingest.helpers import entry, found, lines, sources

ROWS = [
    {"question": "2 + 2?", "gold": "4"},
    {"question": 'How, "so"\nto say?', "gold": "5"},
    {"question": "é", "gold": "6"},
]
PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def contents(ending: str) -> bytes:
    """Return ROWS in one of the formats."""
    frame = pl.DataFrame(ROWS)
    if ending == ".json":
        return json.dumps(ROWS, indent=2).encode()
    if ending == ".jsonl":
        return frame.write_ndjson().encode()
    return frame.write_csv(separator="\t" if ending == ".tsv" else ",").encode()


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".tsv"])
def test_every_format_and_compression_yields_the_same_rows(
    tmp_path: Path, ending: str, packing: str
) -> None:
    path = tmp_path / f"a{ending}{packing}"
    path.write_bytes(PACKED[packing](contents(ending)))
    kept, rejected = found(entry(path))
    assert [(row.prompt, row.answer) for row in kept] == [
        (row["question"], row["gold"]) for row in ROWS
    ]
    assert rejected == []


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_numbers_keep_their_digits(tmp_path: Path, ending: str) -> None:
    golds = ["0.1000000000000000000001", "12345678901234567890.5", "2.50", "1e400"]
    content = ", ".join(f'{{"question": "{gold}?", "gold": {gold}}}' for gold in golds)
    text = f"[{content}]" if ending == ".json" else content.replace("}, {", "}\n{")
    (tmp_path / f"a{ending}").write_text(text)
    kept, rejected = found(entry(tmp_path / f"a{ending}"))
    assert [row.answer for row in kept] == [*golds[:2], "2.5"]
    assert [one.reason for one in rejected] == ["malformed"]


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv"])
def test_format_is_detected_without_an_extension(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "download"
    path.write_bytes(b"\xef\xbb\xbf" + contents(ending))
    assert [row.answer for row in found(entry(path))[0]] == ["4", "5", "6"]
    pl.DataFrame(ROWS).write_parquet(path)
    assert [row.answer for row in found(entry(path))[0]] == ["4", "5", "6"]


def test_csv_keeps_lines_and_raw_text_of_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'question,gold\r\n"two\nlines",2\r\n1 + 1?,2,3\r\n\r\ncaf\xe9,4\r\nnul\0,5\r\n'
        b'3 + 3?,6\r\n"never closed,7\r\n'
    )
    kept, rejected = found(entry(path))
    assert [(row.line, row.prompt, row.answer) for row in kept] == [
        (2, "two\nlines", "2"),
        (8, "3 + 3?", "6"),
    ]
    assert [(one.line, one.reason) for one in rejected] == [
        (4, "malformed"),
        (6, "undecodable"),
        (7, "undecodable"),
        (9, "malformed"),
    ]
    assert rejected[0].content == "1 + 1?,2,3"
    assert "3 fields where the header has 2" in rejected[0].detail
    assert rejected[1].content == "caf\\udce9,4"


def test_bad_byte_in_an_array_rejects_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"question": "caf\xe9", "gold": "1"}, {"question": "2 + 2?", "gold": "4"}, 3]'
    )
    kept, rejected = found(entry(path))
    assert [(row.line, row.answer) for row in kept] == [(2, "4")]
    assert [(one.line, one.reason) for one in rejected] == [(1, "undecodable"), (3, "malformed")]


def test_rejected_parquet_row_has_all_columns_but_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rewards = [{"gold": "4"}, {"gold": None}, {"gold": "6"}]
    images = [None, None, b"\x89PNG" * 1000]
    table = {"q": ["2 + 2?", "1 + 1?", "Q?"], "reward": rewards, "image": images}
    pl.DataFrame(table).write_parquet(path)
    kept, rejected = found(entry(path, prompt="q", answer="reward.gold"))
    assert [(row.line, row.prompt, row.answer) for row in kept] == [(1, "2 + 2?", "4")]
    assert [(one.line, one.reason) for one in rejected] == [(2, "empty_answer"), (3, "needs_image")]
    row = {"q": "1 + 1?", "reward": {"gold": None}, "image": None}
    assert json.loads(rejected[0].content) == row
    assert json.loads(rejected[1].content)["image"] == "<4000 bytes>"


def test_parquet_is_read_in_batches_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BATCH_ROWS", 100)
    numbers = pl.DataFrame({"n": [n / 10 for n in range(250)]}, {"n": pl.Float32})
    numbers.write_parquet(tmp_path / "a.parquet", row_group_size=70)
    read = list(records(tmp_path / "a.parquet", "a.parquet"))
    assert all(isinstance(record, Record) for record in read)
    assert [(record.line, record.fields["n"]) for record in read if isinstance(record, Record)] == [
        (n + 1, n / 10) for n in range(250)
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.json"])
def test_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pack = PACKED.get(path.suffix)
    path.write_bytes(pack(contents(".jsonl") * 99)[:-9] if pack else b'{"question": "1 + 1?"')
    with pytest.raises(ArtifactError, match=rf"{path.name} (is damaged|has dict|is not JSON)"):
        list(records(path, str(path)))


def test_row_above_the_limit_is_one_rejection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MAX_ROW_BYTES", 2000)
    long = {"question": "x" * 10_000, "gold": "1"}
    kept, rejected = found(entry(lines(tmp_path / "a.jsonl", ROWS[0], long, ROWS[0])))
    assert [row.line for row in kept] == [1, 3]
    assert [(one.line, one.reason) for one in rejected] == [(2, "too_large")]
    assert len(rejected[0].content) == bounded.HEAD


@pytest.mark.parametrize("row", ["x" * 10_000 + ",1", '"' + "no end\n" * 1500])
def test_csv_rows_after_one_above_the_limit_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """An unclosed quote extends its row over the following ones, up to the limit."""
    monkeypatch.setattr(bounded, "MAX_ROW_BYTES", 2000)
    content = f"question,gold\n1 + 1?,2\n{row}\n2 + 2?,4\n"
    (tmp_path / "a.csv").write_text(content)
    kept, rejected = found(entry(tmp_path / "a.csv"))
    assert [(row.line, row.answer) for row in kept] == [(2, "2"), (content.count("\n"), "4")]
    assert rejected[0].reason == "too_large"
    (tmp_path / "b.csv").write_text("x" * 9999)
    with pytest.raises(ArtifactError, match=r"b\.csv begins with a row of more than .* MB"):
        found(entry(tmp_path / "b.csv"))


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_rows_before_the_expansion_limit_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    monkeypatch.setattr(bounded, "SMALLEST_LIMIT", 1 << 20)
    monkeypatch.setattr(bounded, "MAX_EXPANSION", 20)
    row = json.dumps({"question": "1 + 1?", "gold": "2"}).encode() + b"\n"
    content = row * 3 + b"0" * (1 << 22)
    path = tmp_path / "a.jsonl"
    path.write_bytes(PACKED[packing](content))
    read = list(records(path, "a.jsonl"))
    assert [(type(one), one.line) for one in read] == [
        *((Record, n) for n in (1, 2, 3)),
        (Rejection, 4),
    ]
    assert isinstance(read[3], Rejection)
    assert (read[3].reason, read[3].detail[:28]) == ("too_large", "it becomes more than 1 MB, m")


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl.bz2", bz2.compress),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl", lambda content: zipped("a.jsonl", content)),
        ("a.zip", lambda content: zipped("a.jsonl", content)),
        ("a.jsonl.gz", lambda content: gzip.compress(gzip.compress(content))),
    ],
)
def test_unsupported_compression_is_an_error(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(pack(json.dumps(ROWS[0]).encode() + b"\n"))
    with pytest.raises(ArtifactError, match=rf"{name} is packed with (bzip2|xz|zip|gzip), which"):
        list(records(tmp_path / name, str(tmp_path / name)))


def zipped(name: str, content: bytes) -> bytes:
    """Return a zip archive of one file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return packed.getvalue()


def test_rows_above_the_expansion_limit_of_a_table_are_not_read(tmp_path: Path) -> None:
    """A file of 3 kB has half a million rows of 100 kB: a repeated entry of a dictionary."""
    path = tmp_path / "a.parquet"
    entries = {3: "1 + 1?", 500_000: "x" * 100_000, 2: "2 + 2?"}
    kind = pa.dictionary(pa.int32(), pa.string())
    with pq.ParquetWriter(path, pa.schema({"question": kind})) as writer:
        for number, text in entries.items():
            column = pa.DictionaryArray.from_arrays(pa.array([0] * number, pa.int32()), [text])
            writer.write_table(pa.table({"question": column}), row_group_size=1_000_000)
    read = list(records(path, "a.parquet"))
    assert [one.line for one in read] == [1, 2, 3, 4]
    fault = read[3]
    assert isinstance(fault, Rejection)
    assert fault.reason == "too_large"
    assert fault.detail.startswith("it becomes more than 256 MB, more than 1000 times its size")


def test_table_with_an_impossible_number_of_rows_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": pa.nulls(20_000_000, pa.string())}), path)
    with pytest.raises(ArtifactError, match="it claims 20,000,000 rows"):
        list(records(path, "a.parquet"))


@pytest.mark.parametrize(("limit", "num"), [(2, 2), (20, 3)])
def test_field_that_no_row_of_a_sample_has_is_named(tmp_path: Path, limit: int, num: int) -> None:
    [source] = sources([entry(lines(tmp_path / "a.jsonl", *ROWS), answer="answer")])
    message = f"in every one of {num} rows there is no answer field.*the last row is .*gold"
    with pytest.raises(ParamsError, match=message):
        list(rows(0, source, None, None, limit=limit))


@pytest.mark.parametrize(
    "value", [b"[" * 100_000, b'{"question": ' + b"[" * 900 + b"]" * 900 + b', "gold": 1}']
)
def test_deep_nesting_is_a_bad_row(tmp_path: Path, value: bytes) -> None:
    kept, rejected = found(entry(lines(tmp_path / "a.jsonl", value, ROWS[0])))
    assert ([row.line for row in kept], [one.reason for one in rejected]) == ([2], ["malformed"])


def test_source_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"ingest\.sources\[0\] \(mapping\) has no rows"):
        found(entry(lines(tmp_path / "a.jsonl")))


def test_wrong_header_is_an_error(tmp_path: Path) -> None:
    for header, message in (("a,b,b", "names a column twice"), ('"a"b', "begins with a row that")):
        (tmp_path / "a.csv").write_text(f"{header}\n1,2,3\n")
        with pytest.raises(ArtifactError, match=message):
            found(entry(tmp_path / "a.csv"))
