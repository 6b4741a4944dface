# SPDX-License-Identifier: Apache-2.0
"""Matrices: what expands to what, and all faults of a file at once, each with its line."""

import textwrap
from pathlib import Path

import jsonschema
import pytest
import yaml

from harness.matrices.expand import load_matrix
from harness.matrices.schema import SCHEMA_PATH, schema, text
from harness.matrices.select import SelectionError, groups, select
from harness.strict_yaml import YamlError

SHIPPED = sorted((Path(__file__).parents[2] / "matrices").glob("*.yaml"))

DEMO = """\
schema_version: 1
kind: parity
question: Is it right?
prompts:
  p: [{random: {length: 5, seed: 1}}]
  q: [{token_ids: [8, 9]}]
base:
  checkpoint: {shape: tiny, dtype: float32, seed: 1, taught: false, quantize: none}
  precision: fp32
  engine: {args: {max_num_seqs: 8}, env: {}}
  sampling: {max_tokens: 3, temperature: 0.0, ignore_eos: true, logprobs: 4}
  workload: {rounds: [{schedule: alone, cached: none, prompts: [p]}]}
  reach: {mamba_ssm_cache_dtype: float32, mamba_cache_mode: none, prefill: whole,
    preemptions: none, cudagraphs: NONE, quantization: null}
  timeout: {start_s: 5, cell_s: 5}
axes:
  dtype:
    fp32: {engine: {args: {dtype: float32}}}
    bf16: {engine: {args: {dtype: bfloat16}}, precision: bf16}
  mode:
    alone: {}
    twice: {workload: {rounds: [{schedule: alone, cached: none, prompts: [p, q]}]}}
    chunk: {engine: {args: {max_num_batched_tokens: 64}}}
"""


@pytest.fixture
def load(tmp_path):
    def write(text: str):
        path = tmp_path / "demo.yaml"
        path.write_text(text)
        return load_matrix(path)

    return write


def faults(load, text: str) -> list[str]:
    with pytest.raises(YamlError) as caught:
        load(text)
    return [line.split("demo.yaml:")[1] for line in str(caught.value).splitlines()]


def test_cells_are_the_product_of_the_axes_named_by_their_values(load):
    cells = load(DEMO).cells
    assert {cell.id for cell in cells} == {
        f"{dtype}-{mode}" for dtype in ("fp32", "bf16") for mode in ("alone", "twice", "chunk")
    }
    assert cells[0].axes == {"dtype": "fp32", "mode": "alone"}


def test_patches_merge_mappings_and_replace_everything_else(load):
    cell = next(c for c in load(DEMO).cells if c.id == "bf16-chunk")
    assert cell.settings.engine.args == {
        "max_num_seqs": 8,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 64,
    }
    assert cell.settings.precision == "bf16"


def test_cells_with_equal_engine_arguments_share_a_group_and_come_together(load):
    matrix = load(DEMO)
    found = {name: [cell.id for cell in cells] for name, cells in groups(matrix.cells).items()}
    assert found == {
        "fp32": ["fp32-alone", "fp32-twice"],
        "fp32-chunk": ["fp32-chunk"],
        "bf16": ["bf16-alone", "bf16-twice"],
        "bf16-chunk": ["bf16-chunk"],
    }
    assert [cell.group for cell in matrix.cells] == sorted(
        (cell.group for cell in matrix.cells), key=list(found).index
    )


def test_an_override_that_changes_the_engine_makes_a_group_of_its_own(load):
    text = DEMO + (
        "overrides:\n"
        "  - {where: {dtype: fp32, mode: twice}, set: {engine: {args: {max_num_seqs: 4}}}}\n"
    )
    names = {cell.id: cell.group for cell in load(text).cells}
    assert names["fp32-alone"] == "fp32"
    assert names["fp32-twice"].startswith("fp32-")
    assert names["fp32-twice"] != names["fp32-chunk"]


def test_exclude_removes_and_include_adds(load):
    text = DEMO + textwrap.dedent("""\
        exclude:
          - {dtype: bf16, mode: [twice, chunk]}
        include:
          - {axes: {dtype: bf16, mode: seqs4}, set: {engine: {args: {max_num_seqs: 4}}}}
        """)
    cells = {cell.id: cell for cell in load(text).cells}
    assert set(cells) == {"fp32-alone", "fp32-twice", "fp32-chunk", "bf16-alone", "bf16-seqs4"}
    assert cells["bf16-seqs4"].settings.engine.args["max_num_seqs"] == 4
    assert cells["bf16-seqs4"].group != cells["bf16-alone"].group


def test_the_hash_of_a_cell_follows_its_settings_and_prompts_and_nothing_else(load):
    before = {cell.id: cell.sha256 for cell in load(DEMO).cells}
    renamed = {cell.id: cell.sha256 for cell in load(DEMO.replace("Is it", "Was it")).cells}
    assert renamed == before
    changed = {cell.id: cell.sha256 for cell in load(DEMO.replace("[8, 9]", "[8, 10]")).cells}
    moved = {name for name in before if before[name] != changed[name]}
    assert moved == {"fp32-twice", "bf16-twice"}


def test_all_faults_are_reported_at_once_with_their_lines(load):
    text = (
        DEMO.replace("precision: fp32", "precission: fp32")
        .replace(
            "schedule: alone, cached: none, prompts: [p, q]",
            "schedule: together, cached: none, prompts: [p]",
        )
        .replace("max_tokens: 3", "max_tokens: many")
    )
    found = faults(load, text)
    assert [line.split(":")[0] for line in found] == ["9", "11", "22"]
    assert "unknown key 'precission' in base; allowed: against, checkpoint, engine," in found[0]
    assert "base.sampling.max_tokens: expected a valid integer, found 'many'" in found[1]
    assert "expected 'alone', 'batched' or 'arrivals', found 'together'" in found[2]


def test_names_that_refer_to_nothing_are_faults_that_list_what_there_is(load):
    text = DEMO.replace("prompts: [p, q]", "prompts: [p, r]") + textwrap.dedent("""\
        exclude:
          - {dtype: fp64}
          - {size: big}
        """)
    assert faults(load, text) == [
        "22: no prompt is called 'r'; known: p, q",
        "25: axis dtype has no value 'fp64'; known: fp32, bf16",
        "26: unknown axis 'size'; known: dtype, mode",
    ]


def test_a_setting_that_no_part_gives_is_missing_not_defaulted(load):
    found = faults(load, DEMO.replace("  timeout: {start_s: 5, cell_s: 5}\n", ""))
    assert found == ["15: `timeout` is missing in fp32-alone, fp32-twice, fp32-chunk, …"]
    found = faults(load, DEMO.replace("preemptions: none, ", ""))
    assert "`reach.preemptions` is missing" in found[0]


def test_a_key_given_twice_is_a_fault(load):
    assert faults(load, DEMO + "kind: parity\n") == ["24: key 'kind' is given twice"]


def test_an_argument_that_the_harness_sets_is_refused(load):
    found = faults(load, DEMO.replace("max_num_seqs: 8", "model: /somewhere"))
    assert len(found) == 1
    assert found[0].startswith("10: ")
    assert "model" in found[0]


def test_excludes_that_leave_nothing_are_a_fault(load):
    found = faults(load, DEMO + "exclude: [{dtype: [fp32, bf16]}]\n")
    assert found == ["24: no cell is left: the excludes remove all"]


@pytest.mark.parametrize("text", ["", "a: [", "- 1\n- 2\n"])
def test_what_is_no_matrix_is_one_error_with_a_line(load, text):
    assert faults(load, text)[0][:2] in {"1:", "2:"}


def test_an_unreadable_file_is_a_matrix_error(tmp_path):
    with pytest.raises(YamlError, match="cannot be read"):
        load_matrix(tmp_path / "absent.yaml")


def test_selection_by_glob_and_axis(load):
    matrix = load(DEMO)
    assert [c.id for c in select(matrix, ["*-chunk"], ["dtype=bf16"])] == ["bf16-chunk"]
    chosen = select(matrix, [], ["mode=alone", "mode=twice", "dtype=fp32"])
    assert [c.id for c in chosen] == ["fp32-alone", "fp32-twice"]


@pytest.mark.parametrize(
    ("globs", "axes", "message"),
    [
        (["nothing*"], [], "no cell of demo matches"),
        ([], ["size=big"], "expected AXIS=VALUE with an axis out of dtype, mode"),
        ([], ["dtype"], "expected AXIS=VALUE"),
        ([], ["dtype=fp64"], "dtype has no value 'fp64'; known: bf16, fp32"),
        (["fp32-*"], ["dtype=bf16"], "the filters leave no cell"),
    ],
)
def test_a_filter_that_selects_nothing_says_why(load, globs, axes, message):
    with pytest.raises(SelectionError, match=message):
        select(load(DEMO), globs, axes)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_matrices_are_valid_and_their_cells_have_files_of_their_own(path):
    matrix = load_matrix(path)
    assert matrix.estimate is not None
    assert len({cell.id.lower() for cell in matrix.cells}) == len(matrix.cells)


def test_the_published_schema_is_what_the_models_say():
    assert SCHEMA_PATH.read_text() == text(), "run `python -m harness schema`"
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_editors_find_no_fault_in_a_shipped_matrix(path):
    data = yaml.safe_load(path.read_text())
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(data)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("precision: fp32", "precission: fp32"),
        ("max_tokens: 3", "max_tokens: many"),
        ("schedule: alone, cached: none, prompts: [p, q]", "schedule: together, prompts: [p]"),
        ("schedule: alone, cached: none, prompts: [p, q]", "schedule: alone, prompts: [p]"),
        ("kind: parity", "kind: parser"),
        ("kind: parity", "kind: party"),
        ("{max_num_seqs: 8}", "{model: /somewhere}"),
        ("{length: 5, seed: 1}", "{length: 0, seed: 1}"),
        ("fp32: {engine", "FP32: {engine"),
    ],
)
def test_what_reading_a_matrix_refuses_an_editor_marks(load, old, new):
    changed = DEMO.replace(old, new)
    assert changed != DEMO
    assert faults(load, changed)
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(yaml.safe_load(changed)))
