"""The origin of a program in the provenance: real checkouts, a linked worktree, none, containers, and no secret."""

import json
import os
import subprocess
import sys

import pytest

import ckptfmt
from ckptfmt.adapters import origin

SECRET = "hunter2-do-not-keep-me"
PROGRAM = """
import sys
import numpy as np
import ckptfmt
ckptfmt.save(sys.argv[1], ckptfmt.State(weights={"w": np.ones(2)}, rng=False), step=1)
"""


def git(folder, *arguments):
    done = subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the program in a folder, and a remote whose URL holds a secret."""
    folder = tmp_path / "checkout"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "train.py").write_text(PROGRAM)
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", f"https://me:{SECRET}@example.com/x.git")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", f"a message with {SECRET}")
    return folder


def saved_by(program, tmp_path, **environment):
    """The provenance of a save by a program in an interpreter of its own, and all its bytes."""
    tmp_path.mkdir(exist_ok=True)
    out = tmp_path / "saved"
    variables = {"PATH": "/usr/bin:/bin", "AWS_SECRET_ACCESS_KEY": SECRET, "TOKEN": SECRET}
    done = subprocess.run(
        [sys.executable, str(program), str(out)],
        cwd=tmp_path,
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = ckptfmt.open(out).leaf("provenance")
    assert SECRET not in json.dumps(found)
    assert not [
        path for path in out.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    return found


def test_a_clean_checkout_is_named_by_its_commit(checkout, tmp_path):
    found = saved_by(checkout / "src" / "train.py", tmp_path)

    assert (found["git_commit"], found["git_changes"]) == (
        git(checkout, "rev-parse", "HEAD"),
        "none",
    )
    assert found["host"]


def test_a_changed_file_is_recorded_and_an_untracked_one_is_not(checkout, tmp_path):
    (checkout / "notes.txt").write_text("untracked")
    assert saved_by(checkout / "src" / "train.py", tmp_path)["git_changes"] == "none"

    with (checkout / "src" / "train.py").open("a") as file:
        file.write("# changed\n")
    (tmp_path / "again").mkdir()
    assert saved_by(checkout / "src" / "train.py", tmp_path / "again")["git_changes"] == "some"


def test_a_linked_worktree_packed_references_and_a_detached_head(checkout, tmp_path):
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    git(checkout, "pack-refs", "--all")
    commit = git(checkout, "rev-parse", "HEAD")
    for folder in (checkout, tmp_path / "linked"):
        assert origin._checkout(folder / "src") == {"git_commit": commit, "git_changes": "none"}
    git(checkout, "checkout", "-q", "--detach")

    assert origin._checkout(checkout) == {"git_commit": commit, "git_changes": "none"}


def test_without_a_checkout_a_variable_names_the_commit(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    found = saved_by(program, tmp_path)
    assert not {"git_commit", "git_changes"} & found.keys()

    (tmp_path / "again").mkdir()
    found = saved_by(program, tmp_path / "again", CKPTFMT_GIT_COMMIT="abc")
    assert found["git_commit"] == "abc"


def test_a_checkout_without_a_commit_or_without_git_stops_no_save(checkout, tmp_path):
    git(tmp_path, "init", "-q", "empty")
    assert origin._checkout(tmp_path / "empty") == {}

    found = saved_by(checkout / "src" / "train.py", tmp_path, PATH=str(tmp_path))
    assert (len(found["git_commit"]), found["git_changes"]) == (40, "unknown")


def test_a_container_is_recorded_with_its_image_as_far_as_known(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    image = "a" * 64
    assert origin._container(tmp_path, "") == {}
    (tmp_path / ".dockerenv").touch()
    assert origin._container(tmp_path, "") == {"container": "docker"}
    named = {"container": "docker", "image_digest": f"sha256:{image}"}
    assert origin._container(tmp_path, f"sha256:{image}") == named

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".containerenv").write_text(f'engine="podman-5"\nimageid="{image}"\n')
    assert origin._container(tmp_path, "") == {"container": "podman", "image_digest": image}


def test_a_value_of_the_caller_takes_the_place_of_a_found_one(tmp_path):
    ckptfmt.save(
        tmp_path / "out",
        ckptfmt.State(weights={}, rng=False, provenance={"git_commit": "mine"}),
        step=1,
    )

    assert ckptfmt.open(tmp_path / "out").leaf("provenance")["git_commit"] == "mine"


def test_a_working_directory_that_is_gone_stops_no_save(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    program = f"import os; os.rmdir({str(folder)!r})\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "git_commit" not in ckptfmt.open(tmp_path / "out").leaf("provenance")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(checkout):
    (checkout / ".git" / "HEAD").unlink()
    os.mkfifo(checkout / ".git" / "HEAD")

    assert origin._checkout(checkout) == {}


def test_a_variable_with_another_commit_says_nothing_of_changes(checkout, tmp_path):
    found = saved_by(checkout / "src" / "train.py", tmp_path, GITHUB_SHA="b" * 40)

    assert (found["git_commit"], "git_changes" in found) == ("b" * 40, False)


def test_a_variable_of_another_form_is_not_recorded_and_named(
    checkout, tmp_path, monkeypatch, caplog
):
    """An address may have a password."""
    address = "https://me:secret@host/repository"
    found = saved_by(
        checkout / "src" / "train.py",
        tmp_path,
        CKPTFMT_GIT_COMMIT=address,
        CKPTFMT_IMAGE_DIGEST="latest",
        GITHUB_SHA="v1.2-rc/3",
    )
    assert (found["git_commit"], "image_digest" in found) == ("v1.2-rc/3", False)
    assert address not in str(found)
    monkeypatch.setenv("CKPTFMT_GIT_COMMIT", address)
    assert origin._read_variable("CKPTFMT_GIT_COMMIT", origin._NAMED) == ""
    assert "CKPTFMT_GIT_COMMIT isn't recorded" in caplog.text
    assert "secret" not in caplog.text


def test_a_main_program_that_git_does_not_know_is_a_change(checkout, tmp_path):
    other = checkout / "src" / "other.py"
    other.write_text((checkout / "src" / "train.py").read_text())
    assert saved_by(other, tmp_path / "untracked")["git_changes"] == "some"
    (checkout / ".git" / "info" / "exclude").write_text("other.py\n")  # such as torchrun in a .venv
    assert saved_by(other, tmp_path / "ignored")["git_changes"] == "none"
