"""Trees as msgpack has them, by their tagged JSON."""

ONE = bytes.fromhex("000000000000f03f")
TWO = bytes.fromhex("0000000000000040")

VALUES = {
    "null": None,
    "true": True,
    "-5": -5,
    '"\\u00e9"': "é",
    "9007199254740991": (1 << 53) - 1,
    '{"int": "9007199254740992"}': 1 << 53,
    '{"int": "-18446744073709551616"}': ["i", (-(1 << 64)).to_bytes(9, "little", signed=True)],
    '{"bytes": "00ff"}': b"\0\xff",
    '{"float": "3ff0000000000000"}': ["f", ONE],
    '{"float": "8000000000000000"}': ["f", bytes(7) + b"\x80"],
    '{"complex": ["3ff0000000000000", "4000000000000000"]}': ["c", ONE + TWO],
    '{"list": [1, {"tuple": []}]}': ["l", 1, ["t"]],
    '{"set": [1, "a", 128, -1]}': ["s", 1, "a", 128, -1],
    '{"frozenset": [2, 1000]}': ["z", 2, 1000],
    '{"dict": [["b", 1], [0, null]]}': ["d", "b", 1, 0, None],
    '{"ordered_dict": [["b", 1], ["a", 2]]}': ["O", "b", 1, "a", 2],
    '{"counter": [["y", 3]]}': ["C", "y", 3],
    '{"deque": [1, "x"], "maxlen": 3}': ["q", 3, 1, "x"],
    '{"deque": [], "maxlen": null}': ["q", None],
    '{"array": "0102", "dtype": "int8", "shape": [2]}': ["a", "int8", [2], b"\1\2"],
    '{"scalar": "07", "dtype": "int8"}': ["n", "int8", b"\7"],
    '{"tensor": "w", "kind": "torch"}': ["T", "w", "torch"],
    '{"dtype": "float32"}': ["D", "float32"],
    '{"device": "cuda:0"}': ["V", "cuda:0"],
    '{"size": [2, 3]}': ["S", [2, 3]],
}
