"""The command line: one module for each command, and what they share.

    app        the parser, and the guard that turns every error into one line and an exit code
    console    what text looks like: colours, tables, sizes, times, and nothing that a hostile name can do
    progress   the bar of long work
    places     what a path is: a checkpoint, a run, or neither
    values     plain values of a checkpoint for eyes and as JSON
    rows       the tensors of a checkpoint, like ones together
    graph      the lineage of a run as a column of characters
    change     pin, unpin, tag, untag, rm
    copies     mirror, promote, scrub
    validate · inspect · log · diff · compact · convert · demo

Each module imports what it needs where it needs it: none of them may cost the start of another.
"""
