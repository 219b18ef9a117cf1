"""The commands of `ckptfmt` by name, and the text of ``ckptfmt --help``.

No library is imported at the start of the program: the help text appears without delay.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's constant; importing typing takes longer than this whole module
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Final

#: The name of the program in its usage, independent of the way of starting it.
PROGRAM: Final = "ckptfmt"

#: Marks a command of the distribution `ckptfmt-tools`, in place of a module.
TOOLS: Final = "ckptfmt_tools"

#: Commands by purpose: description, and implementing module of `ckptfmt.cli`, or `TOOLS`; "" for
#: the conformance suite.
GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "look": {
        "ls": ("the checkpoints of a run; the runs and checkpoints of a directory", "listing"),
        "inspect": (
            "the contents of a checkpoint, or of a run and its newest checkpoint",
            "inspect",
        ),
        "log": ("the checkpoints of a run and their lineage, newest first", "log"),
        "goodput": (
            "the time of a run, over all launches: training, saves, work that was lost",
            TOOLS,
        ),
        "report": ("a picture of a run, as one page of HTML", TOOLS),
        "view": ("a run or checkpoint in the browser, down to single values", TOOLS),
        "diff": ("the tensors and values in which two checkpoints differ, and by how much", TOOLS),
        "du": ("the space that each part of a run or checkpoint takes", "listing"),
    },
    "check": {
        "validate": ("check every byte of a checkpoint or of a run", "validate"),
        "sign": (
            "sign a checkpoint with a key; `validate --key` checks the signature",
            "signing",
        ),
        "repair": (
            (
                "rewrite what is damaged in a run or checkpoint from its copies, and say what can't"
                " be mended"
            ),
            "copies",
        ),
        "rehearse": (
            "kill a training on purpose, and say whether a resume is the same run",
            TOOLS,
        ),
        "doctor": (
            "whether this machine and this place will do: versions, memory, promises of the store",
            TOOLS,
        ),
    },
    "keep and delete": {
        "pin": ("keep a checkpoint of a run, whatever retention says", "change"),
        "unpin": ("leave a checkpoint of a run to retention again", "change"),
        "tag": (
            (
                "give a checkpoint tags, or metrics known only after its save; neither keeps it, as"
                " pin does"
            ),
            "change",
        ),
        "untag": ("take tags of a checkpoint away", "change"),
        "rm": ("delete a checkpoint of a run, unless something needs it", "change"),
        "gc": (
            (
                "delete old checkpoints (--keep N), and files that killed saves left; --dry-run"
                " says"
                " which"
            ),
            "garbage",
        ),
    },
    "copy and convert": {
        "mirror": ("copy a run to another place, every byte compared with its digest", "copies"),
        "promote": ("let a run go on from its mirror", "copies"),
        "scrub": (
            "read all copies of a run, and rewrite what is damaged from a good copy",
            "copies",
        ),
        "compact": ("make a full checkpoint of a delta", "compact"),
        "convert": (
            "from and to torch.save files, DCP directories and Hugging Face directories",
            TOOLS,
        ),
    },
    "plan": {
        "interval": (
            "how often to save: the expected waste by interval, from what saves and failures cost",
            TOOLS,
        ),
        "simulate": (
            "play runs that fail, save and restore, on 8 to 100,000 nodes: their goodput",
            TOOLS,
        ),
    },
    "try": {
        "demo": ("the whole story on this machine, in about a minute", TOOLS),
        "completion": (
            "a script for bash, zsh or tcsh, which then complete what is typed",
            TOOLS,
        ),
        "conformance": ("judge a reader or writer, in any language", ""),
    },
}
#: All commands by name.
COMMANDS: Final = {name: command for group in GROUPS.values() for name, command in group.items()}

USAGE: Final = f"usage: {PROGRAM} COMMAND ... | {PROGRAM} COMMAND --help | {PROGRAM} --version"


def help_text() -> str:
    """Return the text of ``--help``."""
    width = max(map(len, COMMANDS))
    lines = [USAGE, "", "Checkpoints: weights and the context they came from."]
    for title, group in GROUPS.items():
        lines += [
            "",
            title,
            *(f"  {name.ljust(width)}  {text}" for name, (text, _) in group.items()),
        ]
    lines += ["", "PATH, RUN and CHECKPOINT are directories, or URLs such as s3://bucket/run."]
    lines += [
        "Exit codes: 0 done; 1 found (violations, differences, damage); 2 it couldn't be done."
    ]
    return "\n".join(lines)


#: Synonyms, known from similar programs, of some commands.
_ALIKE: Final = {
    **dict.fromkeys(["delete", "remove", "del"], "rm"),
    **dict.fromkeys(["info", "show", "cat", "describe"], "inspect"),
    **dict.fromkeys(["verify", "check", "fsck"], "validate"),
    **dict.fromkeys(["prune", "clean", "cleanup"], "gc"),
    **dict.fromkeys(["export", "import", "consolidate"], "convert"),
    **dict.fromkeys(["list", "dir"], "ls"),
    **dict.fromkeys(["history", "lineage"], "log"),
    **dict.fromkeys(["copy", "cp", "sync", "backup"], "mirror"),
    **dict.fromkeys(["size", "usage"], "du"),
    **dict.fromkeys(["compare", "cmp"], "diff"),
}


def suggest(typed: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to the typed name; None if no name is similar.

    >>> suggest("valdate", ["validate", "inspect"])
    'validate'
    """
    import difflib

    names = list(known)
    if _ALIKE.get(typed) in names:
        return _ALIKE[typed]
    return next(iter(difflib.get_close_matches(typed, names, n=1)), None)
