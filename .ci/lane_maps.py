"""Compares the emulator's lane maps and the kernels' swizzles with CuTe's, a source that is not ours.

    pip download --no-deps nvidia-cutlass==4.2.0.0 -d DIR
    python3 .ci/lane_maps.py DIR/nvidia_cutlass-*.whl

Kernel and emulator sharing a wrong map would agree with each other; this would not agree with both.
CuTe gives a layout as (thread, value) -> index into the operand in column-major order: m + M k for A,
n + N k for B, m + M n for C; for ldmatrix -> bit of the source, 128 bits a row. Of a swizzle it gives how an offset's
bits are exchanged; what stands in the kernels is read there and computed for every chunk of a tile.
"""
import pathlib
import re
import sys
import zipfile

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "kernels"
GOLDEN = KERNELS / "tests/emulated/fragments.txt"
# (file, beginning of the formula, its names for the slow and the fast coordinate, row lengths, bits exchanged)
SWIZZLES = [
    ("gemm_mma.cu", "if constexpr (X_FAST) return ", ("k", "x"), [64, 128, 256], 3),
    ("gemm_mma.cu", "else return ", ("x", "k"), [32], 2),
    ("attention_mma.cu", "int at(int row, int col) { return ", ("row", "col"), [64, 128, 256], 3),
]


def tuple_of(text):
    """Shape<Shape<_4,_8>,_2> -> ((4, 8), 2)."""
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"(Shape|Stride)<", "(", text).replace(">", ",)")
    return eval(re.sub(r"_(\d+)", r"\1", text), {"__builtins__": {}})


def layout_of(text, name, aliases):
    """The (shape, stride) that `using name = ...;` gives."""
    body = re.search(rf"using\s+{name}\s*=\s*([^;]+);", text).group(1)
    if not body.lstrip().startswith("Layout"):
        return layout_of(aliases, body.strip(), aliases)
    inner = re.search(r"Layout<(.*)>\s*$", body, re.S).group(1)
    cut = inner.index("Stride")
    return tuple_of(inner[:cut].rstrip().rstrip(",")), tuple_of(inner[cut:])


def index_of(coordinate, shape, stride):
    """A linear coordinate through a nested shape, first mode fastest."""
    if isinstance(shape, int):
        return coordinate * stride
    index = 0
    for s, d in zip(shape, stride):
        index += index_of(coordinate % size(s), s, d)
        coordinate //= size(s)
    return index


def size(shape):
    if isinstance(shape, int):
        return shape
    product = 1
    for s in shape:
        product *= size(s)
    return product


def pairs(layout, lane, values, split):
    """What a lane's values are, as coordinates of the operand."""
    (threads, vals), (thread_stride, val_stride) = layout
    at = index_of(lane, threads, thread_stride)
    return [split(at + index_of(v, vals, val_stride)) for v in values]


def evaluated(formula, names):
    """An expression of C or CuTe over whole numbers."""
    return eval(formula.replace("/", "//").replace("{}", ""), {"__builtins__": {}, "min": min, "max": max}, names)


def swizzled(text, bits, base, shift, offset):
    """What CuTe's Swizzle<bits, base, shift> makes of an offset, by its own expressions."""
    names = {"num_bits": bits, "num_base": base, "num_shft": shift, "msk_sft": shift, "offset": offset,
             "shiftr": lambda x, s: x >> s if s >= 0 else x << -s}
    for mask in ["bit_msk", "yyy_msk"]:
        names[mask] = evaluated(re.search(rf"using {mask} = cute::constant<int, (.*)>;", text).group(1), names)
    return evaluated(re.search(r"return (offset \^ [^;]*);", text).group(1), names)


def swizzles(text):
    """Compares every chunk of every slice; says how many."""
    count = 0
    for file, begin, (slow, fast), lengths, bits in SWIZZLES:
        source = (KERNELS / "cuda" / file).read_text()
        formula = re.search(re.escape(begin) + r"([^;]*);", source).group(1)
        for length in lengths:
            for row in range(64):
                for col in range(0, length, 8):
                    ours = evaluated(formula, {slow: row, fast: col, "X": length, "SLICE": length, "W": length})
                    # 8 elements are a chunk. Rows of 32 are half of what the banks hold: two have one pattern.
                    shift = 3 if length == 32 else length.bit_length() - 1 - 3
                    theirs = swizzled(text, bits, 3, shift, row * length + col)
                    if ours != theirs:
                        sys.exit(f"{file}: {formula} at {row}, {col} of rows of {length} is {ours}, CuTe's {theirs}")
                    count += 1
    return count


def main():
    wheel = zipfile.ZipFile(sys.argv[1])
    read = lambda name: wheel.read(f"cutlass_library/source/include/cute/{name}").decode()
    mma, copy = read("atom/mma_traits_sm80.hpp"), read("atom/copy_traits_sm75.hpp")
    struct = lambda text, name: re.search(rf"struct \w+<{name}>.*?\n}};", text, re.S).group()
    half, tf32 = struct(mma, "SM80_16x8x16_F16F16F16F16_TN"), struct(mma, "SM80_16x8x8_F32TF32TF32F32_TN")
    plain, trans = struct(copy, "SM75_U32x1_LDSM_N"), struct(copy, "SM75_U16x2_LDSM_T")
    rows16, rows8 = (lambda i: (i % 16, i // 16)), (lambda i: (i // 8, i % 8))
    bits = lambda i: (i // 128, i % 128 // 16)
    operands = {
        "m16n8k16.a": (half, "ALayout", range(8), rows16),
        "m16n8k16.b": (half, "BLayout", range(4), rows8),
        "m16n8k16.c": (half, "CLayout", range(4), rows16),
        "m16n8k8.tf32.a": (tf32, "ALayout", range(4), rows16),
        "m16n8k8.tf32.b": (tf32, "BLayout", range(2), rows8),
        "ldmatrix": (plain, "DstLayout", (0, 16), bits),
        "ldmatrix.trans": (trans, "DstLayout", (0, 16), bits),
    }
    lines = GOLDEN.read_text().splitlines()
    assert len(lines) == 32 * len(operands), "every lane of every operand"
    for line in lines:
        name, lane, rest = re.match(r"(\S+) (\d+): (.*)", line).groups()
        ours = [tuple(map(int, pair.split(","))) for pair in rest.split()]
        text, using, values, split = operands[name]
        theirs = pairs(layout_of(text, using, mma), int(lane), values, split)
        if ours != theirs:
            sys.exit(f"{name} lane {lane}: the emulator says {ours}, CuTe {theirs}")
    chunks = swizzles(read("swizzle.hpp"))
    print(f"lane maps: {len(lines)} lines and the places of {chunks} chunks are CuTe's")


main()
