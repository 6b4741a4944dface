# SPDX-License-Identifier: Apache-2.0
"""Records: load is the inverse of save, files are whole or absent, faults are named."""

import errno
import json
import math
import os

import pytest

from harness.records import store as records
from tests import evidence


def test_a_loaded_record_equals_the_saved_one(tmp_path):
    record = evidence.record()
    path = records.save(record, tmp_path)
    assert path == tmp_path / "fp32-alone.json"
    assert records.load(path) == record


def test_numbers_survive_exactly_even_those_that_are_none(tmp_path):
    values = [-0.1, 1e-300, math.inf, math.nan]
    request = evidence.request("p", tokens=4, logprobs=values)
    record = evidence.record(observation=evidence.observation(requests=[request]))
    loaded = records.load(records.save(record, tmp_path)).observation.requests[0].logprobs
    assert loaded[:3] == values[:3]
    assert math.isnan(loaded[3])


def test_a_full_disk_leaves_the_old_record_and_no_rest(tmp_path, monkeypatch):
    path = records.save(evidence.record(), tmp_path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        records.save(evidence.record(kind="parser"), tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_record_is_refused(tmp_path):
    path = records.save(evidence.record(), tmp_path)
    path.write_text(path.read_text()[:400])
    with pytest.raises(records.RecordError, match="Invalid JSON"):
        records.load(path)


def test_every_fault_of_a_record_is_named(tmp_path):
    path = records.save(evidence.record(), tmp_path)
    data = json.loads(path.read_text())
    del data["seeds"]
    data["colour"] = "red"
    data["timings_s"]["cell"] = "long"
    path.write_text(json.dumps(data))
    with pytest.raises(records.RecordError) as caught:
        records.load(path)
    assert all(name in str(caught.value) for name in ("seeds", "colour", "timings_s.cell"))


def test_another_schema_version_is_refused_by_name(tmp_path):
    path = records.save(evidence.record(), tmp_path)
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(records.RecordError, match="schema_version: Input should be 1"):
        records.load(path)


def test_a_run_tells_which_of_its_cells_have_no_record(tmp_path):
    records.save_header(evidence.header("fp32-alone", "fp32-twice", "fp32-half"), tmp_path)
    records.save(evidence.record(), tmp_path)
    (tmp_path / "fp32-half.json").write_text("{")
    header, found, faults = records.load_run(tmp_path)
    assert header.cells == ["fp32-alone", "fp32-twice", "fp32-half"]
    assert [record.cell for record in found] == ["fp32-alone"]
    assert faults[0] == "fp32-twice: no record; the cell was selected but did not finish"
    assert faults[1].startswith("fp32-half: ")


def test_a_folder_without_a_header_is_no_run(tmp_path):
    with pytest.raises(records.RecordError, match=r"run\.json: cannot be read"):
        records.load_run(tmp_path)
    with pytest.raises(records.RecordError, match="not a folder"):
        records.load_run(tmp_path / "absent")
