"""Time and memory for reading rows in each form of file: python benchmarks/read_rows.py [--rows 1000000] [FORM ...]

Each form is read in a new process, as in `nemo-kto data check`: rows become records, without a tokenizer.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FORMS = ("jsonl", "json", "csv", "parquet", "jsonl.gz", "csv.zst")
_READ = "import sys; sys.path.insert(0, {folder!r}); from read_rows import read; read({file!r})"


def rows(count: int) -> Iterator[dict[str, object]]:
    for number in range(count):
        yield {
            "prompt": f"question {number}: " + "word " * 20,
            "response": "answer " * 30,
            "thumb": ("up", "down")[number % 2],
        }


def write(file: Path, count: int) -> None:
    """Write ``count`` rows in the form of the suffix; Parquet in row groups of 100,000 rows."""
    import pyarrow
    from pyarrow import parquet

    if file.suffix == ".parquet":
        with parquet.ParquetWriter(file, pyarrow.Table.from_pylist(list(rows(1))).schema) as writer:
            for start in range(0, count, 100_000):
                writer.write_table(pyarrow.Table.from_pylist(list(rows(min(100_000, count - start)))))
        return
    kinds = {".gz": "gzip", ".zst": "zstd"}
    plain = file.with_suffix("") if file.suffix in kinds else file
    with plain.open("w", encoding="utf-8", newline="") as text:
        if plain.suffix == ".csv":
            writer_of_csv = csv.DictWriter(text, list(next(rows(1))))
            writer_of_csv.writeheader()
            writer_of_csv.writerows(rows(count))
        elif plain.suffix == ".json":
            text.writelines(("[" if n == 0 else ",\n") + json.dumps(row) for n, row in enumerate(rows(count)))
            text.write("]")
        else:
            text.writelines(json.dumps(row) + "\n" for row in rows(count))
    if plain != file:
        with pyarrow.CompressedOutputStream(str(file), kinds[file.suffix]) as stream, plain.open("rb") as content:
            while chunk := content.read(2**20):
                stream.write(chunk)


def read(file: str) -> None:
    """Print records, seconds and peak memory of reading a file."""
    from nemo_kto.data.rows.files import file_parts
    from nemo_kto.data.rows.reader import Fields, FileColumns, FileReader, RowErrors

    began = time.process_time()
    broken = RowErrors()
    reader, columns = FileReader(fields=Fields({"label": "thumb"}), broken=broken), FileColumns()
    records = sum(1 for part in file_parts(Path(file)) for _ in reader.kto_records(file, columns, part))
    broken.raise_if_any()
    seconds, size = time.process_time() - began, Path(file).stat().st_size / 2**20
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024  # not ru_maxrss, which includes that of the process that started this one
    print(f"{Path(file).name:14} {size:6.0f} MiB {records:10,} records {seconds:6.1f} CPU s, {peak:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("form", nargs="*", default=FORMS, metavar="FORM")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for form in flags.form:
            file = Path(folder, f"rows.{form}")
            write(file, flags.rows)
            code = _READ.format(folder=str(Path(__file__).parent), file=str(file))
            subprocess.run([sys.executable, "-c", code], check=True)
            file.unlink()


if __name__ == "__main__":
    main()
