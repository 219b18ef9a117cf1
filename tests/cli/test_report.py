"""The picture of a run: what it says, what it can't be made to do, and what a browser shows of it."""

from __future__ import annotations

import html.parser
import json
import pathlib
import random
import re
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import Code
from ckptfmt_tools.report.charts import draw_lines, squarify
from ckptfmt_tools.report.report_page import _SCRIPT
from ckptfmt_tools.report.run_picture import TreeCell, group_by_size
from tests.cli.made_up import MadeUpRun
from tests.interface.test_group import run_writers

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
with_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium isn't installed")
HOSTILE = '</title></style><script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&'
SECTIONS = ("launches", "sizes", "tensors", "writers", "pieces", "times", "metrics", "checkpoints")


class Page(html.parser.HTMLParser):
    """What is in a page: how many elements of each kind, all text but scripts and styles, all attributes."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._inside: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.elements[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        self._inside.append(tag)

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"}.intersection(self._inside):
            self.text += data
        if self._inside[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module", params=[300, pytest.param(1000, marks=pytest.mark.exhaustive)])
def large(request, tmp_path_factory):
    """A run of so many checkpoints, whose newest has 100 times as many tensors, and one: 100,001 of the largest."""
    path = tmp_path_factory.mktemp("report") / "run"
    return (
        path,
        MadeUpRun(path, checkpoints=request.param, layers=request.param * 10).head,
        request.param,
    )


@pytest.fixture
def page_of(call, tmp_path):
    """Make the page of a run; return it parsed, and its path."""

    def page_of(run, code=0):
        path = tmp_path / "page.html"
        found, _, err = call("report", run, "--html", path)
        assert (found, err) == (code, "")
        return Page(path.read_text("utf-8")), path

    return page_of


# What it says


def test_launches_rollbacks_and_what_went_wrong_are_told(page_of, run_path):
    page, _ = page_of(run_path)

    rows = {row[0]: row[1:] for row in page.rows}
    assert rows["1"] == ["began from nothing", "10 to 40", ""]
    resumed = (
        f"resumed from {checkpoint_name(20, 1)}, chosen by hand; 10 steps back from where"
        " launch 1 had come to"
    )
    assert rows["2"] == [resumed, "30 to 50", ""]
    assert f"{checkpoint_name(40, 1)}: unfinished" in page.text
    assert f"{checkpoint_name(40, 2)}: aborted, given up" in page.text
    assert "5 committed, 1 unfinished, 1 aborted" in page.text
    assert "How a launch ended isn't recorded" in page.text


def test_what_isnt_recorded_is_said_to_be_so(page_of, call_json, run_path):
    page, _ = page_of(run_path)
    _, answer = call_json("report", run_path)

    assert [row for row in page.rows if row[-1] == "not recorded"] == [
        ["training that it cost: while it was staged, and beside it", "not recorded"],
        ["from its begin to its commit", "not recorded"],
    ]
    assert "ledger=True" in page.text
    assert answer["durations"] == {"training_s": None, "commit_s": None}


def test_deltas_are_told_from_full_checkpoints(page_of, tmp_path):
    MadeUpRun(tmp_path / "run", checkpoints=48)
    page, _ = page_of(tmp_path / "run")

    assert re.search(r"\d+ deltas store \d+ % of what they hold; [\d.]+ \w+ are saved", page.text)
    assert {"full", "delta"} <= {value for name, value in page.attributes if name == "class"}


def test_tags_pins_and_metrics_are_there(page_of, tmp_path):
    made = MadeUpRun(tmp_path / "run", checkpoints=48)
    page, _ = page_of(tmp_path / "run")

    assert [row[-1] for row in page.rows if "#release" in row[-1]] == ["pinned; #release"] * 2
    assert re.search(rf"{made.head}: loss \d\.\d+", page.text)
    assert f"The run goes on from {made.head}" in page.text


def test_pieces_name_their_writers(page_of, tmp_path):
    """Two processes, each with the rows of its own."""

    def save(writer):
        rows = {(6 * writer, 0): np.zeros((6, 700), np.float32)}
        state = ckptfmt.State(
            weights={"w": ckptfmt.source_of("w", rows, global_shape=(12, 700))}, rng=False
        )
        place, workers = tmp_path / "run", (writer, 2)
        checkpointer = ckptfmt.Checkpointer(
            place, state, writer=workers, agree="pieces", saver="inline"
        )
        checkpointer.restore()
        checkpointer.save(step=1)
        checkpointer.close()

    assert run_writers(2, save) == [None, None]
    page, _ = page_of(tmp_path / "run")
    assert "w[6:12, 0:700] from writer 1, 16.4 KiB" in page.text
    assert re.search(r"writer 0: 1 piece; weights 16\.4 KiB", page.text)


def test_json_has_the_same(call_json, run_path):
    code, answer = call_json("report", run_path)

    assert (code, answer["kind"], answer["problems"]) == (0, "report", [])
    assert [(one["step"], one["launch"], one["state"]) for one in answer["saves"]][-1] == (
        50,
        2,
        "committed",
    )
    assert [one["back_steps"] for one in answer["launches"]] == [0, 10]
    newest = answer["newest"]
    assert newest["name"] == checkpoint_name(50, 2)
    assert (
        sum(cell["nbytes"] for cell in newest["cells"]) == newest["nbytes"] == 2 * 12 * 700 * 4 + 8
    )
    assert newest["writers"][0]["nbytes_by_field"] == {"weights": newest["nbytes"]}


def test_it_asks_for_somewhere_to_write(call, run_path):
    code, out, err = call("report", run_path)

    assert (code, out) == (2, "")
    assert Code.ARGUMENT in err
    assert "--html run.html" in err


def test_a_damaged_register_and_a_damaged_index_are_named_and_the_rest_is_shown(page_of, run_path):
    (run_path / checkpoint_name(10, 1) / "manifest.json").write_bytes(b"{}")
    for index in (run_path / checkpoint_name(50, 2)).glob("index-*"):
        index.write_bytes(index.read_bytes()[:-1])
    page, _ = page_of(run_path, code=2)

    assert "problems" in page.ids
    assert f"{checkpoint_name(10, 1)}/manifest.json" in page.text
    assert f"{checkpoint_name(50, 2)}/index-" in page.text
    assert "There are none to show." in page.text
    assert f"{checkpoint_name(30, 2)}: committed" in page.text


def test_a_run_without_checkpoints_has_a_page(page_of, tmp_path):
    (tmp_path / "run" / "launches").mkdir(parents=True)
    page, _ = page_of(tmp_path / "run")

    assert "No launch has begun." in page.text
    assert "No checkpoint is committed." in page.text


# Against another run


def test_the_report_of_one_writer_has_no_identical_strips(page_of, tmp_path):
    """One process stored each tensor in one piece: the strips said that twenty times."""
    trajectory(tmp_path / "alone", steps=1)
    page, _ = page_of(tmp_path / "alone")
    assert "writers" in page.ids
    assert "pieces" not in page.ids
    assert "Pieces of the largest tensors" not in page.text


def test_without_a_ledger_the_share_of_training_is_unknown(page_of, call, call_json, tmp_path):
    """It was 100.0 %: all that the saves show is from the first one to the last one."""
    trajectory(tmp_path / "run")
    page, _ = page_of(tmp_path / "run")
    said = "unknown: no ledger was kept; Checkpointer(ledger=True) keeps one"
    assert f"Goodput, the share of training that counts: {said}." in page.text
    assert "100.0" not in page.text
    assert call_json("goodput", tmp_path / "run")[1]["goodput"] is None
    out = call("goodput", tmp_path / "run")[1]
    assert f"goodput {said}" in " ".join(out.split())
    assert "100.00 %" not in out


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ("data", "the runs took other samples between step 3 and it"),
        ("rng", "one of the runs drew other random numbers between step 3 and it"),
        ("weights", "by a state that isn't saved, by the contents of the samples, or by kernels"),
    ],
)
def test_the_cause_of_a_divergence_is_named_as_far_as_it_shows(changed, cause, call, tmp_path):
    for name, differs in (("one", False), ("other", True)):
        weights, stream = {"w": np.zeros(8, np.float32)}, np.random.default_rng(1)
        state = ckptfmt.State(weights=weights, data={"position": 0}, rng={"own": stream})
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        torch.manual_seed(0)
        with ckptfmt.Checkpointer(tmp_path / name, state, every=1, saver="inline") as checkpointer:
            for step in checkpointer.steps(4):
                part = differs and step == 3
                weights["w"] += 2 if part else 1
                state.data = {"position": step + 9 * (part and changed == "data")}
                if part and changed == "rng":
                    stream.random()
    code, out, _ = call(
        "report", tmp_path / "one", "--html", tmp_path / "p.html", "--against", tmp_path / "other"
    )
    text = " ".join(out.split())
    assert code == 0
    assert (
        "The first difference is weights:w at step 4: 8 of 8 elements differ, by at most 1" in text
    )
    assert cause in text


def trajectory(path, *, steps=6, part_at=None):
    """Train a run without a framework; from a step on, one tensor takes another way, and a second one step later."""
    weights = {"a.w": np.zeros(64, np.float32), "b.w": np.zeros(8, np.float32)}
    values = {"count": 0}
    state = ckptfmt.State(weights=weights, extra={"seen": values}, rng=False)
    with ckptfmt.Checkpointer(path, state, every=1, saver="inline") as checkpointer:
        for step in checkpointer.steps(steps):
            weights["a.w"] += 1
            weights["b.w"] += 1
            if part_at is not None:
                weights["a.w"][7] += 1e-3 * (step + 1 == part_at)
                weights["b.w"][0] += 0.5 * (step + 1 == part_at + 1)
                values["count"] += step + 1 == part_at


def test_two_trajectories_part_at_a_step_tensor_by_tensor(page_of, call, call_json, tmp_path):
    trajectory(tmp_path / "one")
    trajectory(tmp_path / "same")
    trajectory(tmp_path / "other", part_at=4)

    code, answer = call_json("report", tmp_path / "one", "--against", tmp_path / "same")
    assert (code, answer["divergence"]["steps"], answer["divergence"]["compared_count"]) == (
        0,
        [],
        6,
    )
    code, answer = call_json("report", tmp_path / "one", "--against", tmp_path / "other")
    found = answer["divergence"]
    assert (code, found["last_same_step"]) == (0, 3)
    assert [one["step"] for one in found["steps"]] == [4, 5, 6]
    assert [(one["name"], one["first_step"]) for one in found["names"]] == [
        ("a.w", 4),
        ("extra/seen", 4),
        ("b.w", 5),
    ]
    assert found["names"][2]["distances"][0] is None
    assert found["names"][0]["distances"][0].startswith("1 of 64 elements differ, by at most 0.001")

    path = tmp_path / "page.html"
    code, out, _ = call("report", tmp_path / "one", "--html", path, "--against", tmp_path / "other")
    assert (code, "the same up to step 3, and different from step 4 on" in out) == (0, True)
    assert (
        "The first difference is weights:a.w at step 4: 1 of 64 elements differ, by at most 0.001"
        in " ".join(out.split())
    )
    page = Page(path.read_text("utf-8"))
    assert "divergence" in page.ids
    assert "the same up to step 3, and different from step 4 on" in page.text
    assert "weights:b.w at step 4: the same" in page.text
    assert "extra:seen at step 4: another value" in page.text
    assert "weights:b.w at step 5: 1 of 8 elements differ, by at most 0.5" in page.text
    assert "divergence" not in page_of(tmp_path / "one")[0].ids


def test_runs_without_a_step_in_common_are_refused(call, run_path, tmp_path):
    trajectory(tmp_path / "one", steps=1)
    code, out, err = call("report", run_path, "--against", tmp_path / "one", "--json")
    assert code == 2
    assert "no step in common" in out + err


# What it can't be made to do


def test_names_and_tags_are_text_whatever_they_are(page_of, tmp_path):
    MadeUpRun(
        tmp_path / "run",
        checkpoints=30,
        tag=HOSTILE,
        prefix=HOSTILE.replace("/", "").replace(".", ""),
    )
    page, _ = page_of(tmp_path / "run")

    assert (page.elements["script"], page.elements["style"], page.elements["img"]) == (1, 1, 0)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert f"#{HOSTILE}" in page.text
    assert "<img src=x onerror=alert(1)>" in page.text


def test_it_asks_the_network_for_nothing(page_of, run_path):
    page, path = page_of(run_path)

    assert (
        not {"link", "img", "iframe", "object", "embed", "base", "form", "a"} & page.elements.keys()
    )
    assert not {"src", "href", "style", "srcset"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?:|url\(|@import|fetch\(", path.read_text("utf-8"))
    assert ("http-equiv", "Content-Security-Policy") in page.attributes


# What it costs


@pytest.mark.slow
def test_a_thousand_checkpoints_and_a_hundred_thousand_tensors_are_a_small_page(page_of, large):
    path, head, count = large
    page, written = page_of(path)

    assert written.stat().st_size < 1 << 20
    assert sum(page.elements.values()) < 20_000
    assert f"{count} checkpoints" in page.text
    assert f"{head}: {100 * count + 1} tensors" in page.text
    assert f"A bar is the mean of up to {-(-count // 200)} checkpoints" in page.text


def leaves_of(cells):
    for cell in cells:
        yield from leaves_of(cell.cells) if cell.cells else (cell,)


@pytest.mark.parametrize(
    "names",
    [
        [f"layers.{number}.w" for number in range(20_000)],
        [f"t{number}" for number in range(20_000)],
        [
            ".".join("abcdefghijklmnopqrstuvwxyz"[: number % 26 + 1]) + f".{number}"
            for number in range(20_000)
        ],
        ["a", "a.b", "a.b.c", "", "."],
    ],
)
def test_cells_hold_every_tensor_once_and_are_few(names):
    sizes = [1 + number % 7 * 1000 for number in range(len(names))]
    cells = group_by_size(
        [("weights", name, nbytes) for name, nbytes in zip(names, sizes, strict=True)]
    )

    def check(cell: TreeCell) -> None:
        if cell.cells:
            assert sum(one.nbytes for one in cell.cells) == cell.nbytes
            assert sum(one.tensor_count for one in cell.cells) == cell.tensor_count
        for one in cell.cells:
            check(one)

    check(cells[0])
    assert (cells[0].nbytes, cells[0].tensor_count) == (sum(sizes), len(sizes))
    assert min(5, len(names)) <= len(list(leaves_of(cells))) <= 300


def test_areas_are_sizes():
    sizes = [500.0, 433, 78, 25, 25, 7, 1, 1e-9]
    places = squarify(sizes, (10, 20, 300, 100))

    areas = [width * height for _, _, width, height in places]
    assert areas == pytest.approx([size / sum(sizes) * 30_000 for size in sizes])
    assert all(x >= 10 and x + width <= 310 + 1e-6 for x, _, width, _ in places)
    assert all(y >= 20 and y + height <= 120 + 1e-6 for _, y, _, height in places)


@pytest.mark.parametrize(
    "values", [[1.7e308, -1.7e308], [5e-324, 0.0], [3.0, 3.0], [1e16, 1e16 + 2]]
)
def test_any_number_can_be_drawn(values):
    points = [(step, value, "") for step, value in enumerate(values)]
    drawing = draw_lines([("on", points)], str, "numbers")

    assert not re.search(r'="[^"]*(nan|inf)', drawing)
    assert drawing.count("<text") < 60


# What a browser shows


def browse(page: pathlib.Path, *options: str) -> tuple[str, str]:
    """Open a page in Chromium; return its DOM, if that was asked for, and what was said in the console."""
    assert CHROMIUM is not None
    profile = page.parent / f"profile-{len(list(page.parent.iterdir()))}"
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--enable-logging=stderr", f"--user-data-dir={profile}",
    )  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *flags, *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@with_chromium
def test_a_browser_shows_every_section_and_complains_of_nothing(page_of, tmp_path):
    made = MadeUpRun(tmp_path / "run", checkpoints=48, tag=HOSTILE)
    before, path = page_of(tmp_path / "run")
    dom, console = browse(path, "--dump-dom")

    page = Page(dom)
    assert console == ""
    assert [name for name in page.ids if name in SECTIONS] == list(SECTIONS)
    assert (page.elements["svg"], page.elements["img"], page.elements["script"]) == (
        before.elements["svg"],
        0,
        1,
    )
    assert "tip" in page.ids  # the script has run
    assert f"The run goes on from {made.head}" in page.text
    assert "owned" not in dom.split("</title>")[0]


@with_chromium
def test_what_the_script_does_is_seen(page_of, run_path, tmp_path):
    """Also that an error in a script would be: the policy is taken off, and another script points at a rectangle."""
    _, path = page_of(run_path)
    pointing = """
    <script>
    document.querySelector("rect.cell").dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    missing.member;
    </script>"""
    content = re.sub(r'<meta http-equiv="Content[^>]*>', "", path.read_text("utf-8"))
    other = tmp_path / "other.html"
    other.write_text(content.replace("</body>", f"{pointing}</body>"), "utf-8")
    dom, console = browse(other, "--dump-dom")

    (tip,) = re.findall(r'<div id="tip"[^>]*>([^<]*)</div>', dom)
    assert tip == "weights: 3 tensors, 65.6 KiB"
    assert "missing is not defined" in console


@with_chromium
def test_a_script_of_somebody_else_is_refused(page_of, run_path, tmp_path):
    _, path = page_of(run_path)
    other = tmp_path / "other.html"
    other.write_text(
        path.read_text("utf-8").replace(_SCRIPT, f"{_SCRIPT} document.title = 'owned';"), "utf-8"
    )
    dom, console = browse(other, "--dump-dom")

    assert "owned" not in dom.split("</title>")[0]
    assert "Content Security Policy" in console


@pytest.mark.slow
@with_chromium
def test_a_browser_opens_and_prints_the_page_of_a_thousand_checkpoints(page_of, large):
    path, head, _ = large
    _, written = page_of(path)
    dom, console = browse(written, "--dump-dom")
    printed = written.with_suffix(".pdf")
    browse(written, f"--print-to-pdf={printed}", "--no-pdf-header-footer")

    assert console == ""
    assert f"The run goes on from {head}" in Page(dom).text
    content = printed.read_bytes()
    assert content.startswith(b"%PDF")
    assert (
        3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
    )  # the list of all checkpoints is left out


def test_the_page_is_named_in_what_is_said(call, run_path, tmp_path):
    code, out, _ = call("report", run_path, "--html", tmp_path / "run.html")

    assert code == 0
    assert re.fullmatch(
        (
            rf"{re.escape(str(tmp_path / 'run.html'))}  7 checkpoints \([a-z0-9, ]+\), page of"
            r" [\d.]+"
            r" KiB\n"
        ),
        out,
    )


def test_page_and_json_come_together(call, run_path, tmp_path):
    code, out, _ = call("report", run_path, "--html", tmp_path / "run.html", "--json")

    assert (code, json.loads(out)["kind"]) == (0, "report")
    assert (tmp_path / "run.html").read_bytes().startswith(b"<!DOCTYPE html>")


def test_where_no_page_can_be_written_it_is_an_error(call, run_path, tmp_path):
    code, out, err = call("report", run_path, "--html", tmp_path / "nowhere" / "run.html")

    assert (code, out) == (2, "")
    assert err.startswith("error: STORE_ACCESS at ")
    assert "No such file or directory" in err
    assert "Give a path in a directory that is there" in err
