"""Removes each barrier, wait, commit and bounds predicate of the shipped kernels, one at a time, and runs their tests.

    python3 .ci/mutate_kernels.py                      all of them: long
    python3 .ci/mutate_kernels.py --only rope gelu     those of these files
    python3 .ci/mutate_kernels.py --sample 8 --seed 3  some, drawn
    python3 .ci/mutate_kernels.py --list               what would be removed

A mutant must be reported by the emulator or change a number. What survives stands in .ci/mutants.txt with the reason
why nothing can see it; any other survivor makes the run fail, and so does a line of that file that is caught after all.

All mutants are in one build: in a copy of the tree each place asks whether it is the one that is removed, which
QUINTET_MUTANT names, so that a mutant costs no compilation. Loops lose no bound but go one further.
"""
import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SURVIVORS = ROOT / ".ci" / "mutants.txt"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
TREE = TARGET / "mutants"
ORDER = re.compile(r"(?:__syncthreads|__syncwarp|cp_async_wait<[^>]*>|cp_async_commit|bar_sync|bar_arrive)\([^;()]*\)(?=;)")
COMPARE = re.compile(r" (<=|>=|<|>) ")
# Where an operand begins and ends, at its own depth of parentheses.
EDGES = ["&&", "||", "?", ":", ";", ",", "=", "return"]
# Two characters that are no edge although one of them is.
JOINED = re.compile(r"::|==|<=|>=|!=|\w=$|[+*/-]=")
# The tests of a file: filters of the test program `emulated`, the quickest first.
TESTS = {
    "attention_mma": ["flash::unseen", "flash::nothing", "flash::pieces_in_order", "flash::every_width", "flash::near_naive", "golden"],
    "attention_simt": ["flash::unseen", "flash::nothing", "flash::pieces", "flash::near_naive", "flash::adjoint"],
    "gemm_mma": ["products", "groups", "golden"], "gemm_simt": ["products", "groups"], "gemm_tf32": ["tf32", "golden"],
    "add": ["sums"], "cast": ["casts"], "cross_entropy": ["cross_entropy", "linear_loss"], "dropout": ["dropout", "own_kernels"], "fold": ["folds"],
    "embedding": ["embedding"], "gelu": ["::gelu"], "layer_norm": ["layer_norm"], "optimizer": ["adamw", "sgd", "squares"],
    "permute": ["rows"], "prelude": ["rms_norm", "squares", "dropout", "layer_norm"], "rms_norm": ["rms_norm"], "rope": ["rope"],
    "router": ["router"], "swiglu": ["swiglu"],
}
ASKS = '#pragma once\n\nextern "C" int emu_mutated(int number);\n'
ANSWERS = """
extern "C" char* getenv(const char*);
extern "C" int atoi(const char*);
extern "C" int emu_mutated(int number) {
    static const char* asked = getenv("QUINTET_MUTANT");
    static const int mutant = asked ? atoi(asked) : -1;
    return number == mutant;
}
"""


def operand(code, at, step):
    """Where the operand that ends (step -1) or begins (step 1) at `at` stops, and the edge it stops at."""
    depth = 0
    while 0 <= at < len(code):
        opens, closes = ("([{", ")]}") if step > 0 else (")]}", "([{")
        if code[at] in opens:
            depth += 1
        elif code[at] in closes:
            if depth == 0:
                return at, code[at]
            depth -= 1
        elif depth == 0:
            for edge in EDGES:
                from_ = at if step > 0 else at - len(edge) + 1
                if from_ >= 0 and code.startswith(edge, from_) and not JOINED.search(code[max(0, from_ - 1) : from_ + len(edge) + 1]):
                    return at, edge
        at += step
    return at, ""


def bounds(code):
    """(start, end, replacement) of each comparison that guards something."""
    guards = re.search(r"\b(if|for|while) \(|\bbool \w+ =|\?|\breturn\b", code)
    if not guards or any(word in code for word in ["constexpr", "static_assert", "__align__"]):
        return
    leaves = re.search(r"\bif \(.*\b(return|continue|break);", code)
    for found in COMPARE.finditer(code):
        left, before = operand(code, found.start() - 1, -1)
        right, after = operand(code, found.end(), 1)
        start = left + 1 + (len(code[left + 1 : found.start()]) - len(code[left + 1 : found.start()].lstrip()))
        if before == "" or right <= found.end():
            continue
        text = code[start:right].rstrip()
        end, limit = start + len(text), code[found.end() : right].strip()
        if re.search(r"\bfor \(", code) and code.count(";", 0, start) == 1 and after == ";":
            # A loop's own bound; where it is a constant the tile is what it is.
            if not re.fullmatch(r"[A-Z0-9_:\w]*::[A-Z_0-9 /]+|[A-Z_0-9 /*]+|\d+", limit) and found.group(1) == "<":
                yield start, end, f"(emu_mutated(%d) ? {code[start:found.start()]} <= {limit} : {text})"
        elif "||" in (before, after):
            yield start, end, f"(!emu_mutated(%d) && {text})"
        elif "&&" in (before, after) or not leaves:
            yield start, end, f"(emu_mutated(%d) || {text})"
        else:
            yield start, end, f"(!emu_mutated(%d) && {text})"


def mutants(path):
    """The file with a question at each place, and (file, what, line) for each, in order."""
    out, places = [], []
    for line in path.read_text().splitlines(keepends=True):
        code = line.split("//")[0]
        found = [(m.start(), m.end(), f"(emu_mutated(%d) ? (void)0 : {m.group()})") for m in ORDER.finditer(code)]
        found += bounds(code) if not code.lstrip().startswith("#") else []
        shift, words = 0, line.strip(" \\\n")
        ended = 0
        for start, end, instead in sorted(found, key=lambda f: (f[0], -f[1])):
            if start < ended:
                continue  # within another
            ended = end
            places.append((path.stem, code[start:end], words))
            # Numbers are given when all files are known.
            instead = instead.replace("%d", f"@{len(places) - 1}@")
            line = line[: start + shift] + instead + line[end + shift :]
            shift += len(instead) - (end - start)
        out.append(line)
    return "".join(out), places


def key(places):
    """A line's words for each place: equal ones are counted."""
    seen, keys = {}, []
    for file, what, line in places:
        words = f"{file}: {what} in `{line}`"
        seen[words] = seen.get(words, 0) + 1
        keys.append(words + (f" #{seen[words]}" if seen[words] > 1 else ""))
    return keys


def copy(text_of):
    """The tree, with what of it is changed; files that are as they were keep their times."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for name in listed:
        source, to = ROOT / name, TREE / name
        if not source.is_file():
            continue
        data = text_of.get(source, None)
        data = source.read_bytes() if data is None else data.encode()
        if not to.exists() or to.read_bytes() != data:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)


def build():
    """The test program."""
    command = ["cargo", "test", "-q", "-p", "quintet-kernels", "--features", "emulated,wire", "--test", "emulated", "--no-run",
               "--message-format", "json"]
    done = subprocess.run(command, cwd=TREE, env=dict(os.environ, CARGO_TARGET_DIR=str(TARGET)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("mutants: the tests do not build")
    built = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    program = [m["executable"] for m in built if m.get("executable") and m["target"]["name"] == "emulated"][-1]
    (TREE / "program").write_text(program)
    return program


def passes(program, file, mutant, seeds, seconds):
    """Whether the file's tests pass without that place; not where they do not end."""
    environment = dict(os.environ, QUINTET_MUTANT=str(mutant), QUINTET_EMULATED_SEEDS=str(seeds), RUST_BACKTRACE="0")
    ended = time.time() + seconds
    for one in TESTS.get(file, [""]):
        try:
            run = subprocess.run([program, "-q", one], env=environment, cwd=TREE / "kernels", stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, timeout=max(1, ended - time.time()), check=False)
        except subprocess.TimeoutExpired:
            return False
        if run.returncode:
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="FILE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--built", action="store_true", help="by the program of the last run, where only its options differ")
    parser.add_argument("--seconds", type=float, default=0, help="ends before the next mutant after so long")
    options = parser.parse_args()
    places, text_of = [], {}
    for path in sorted((ROOT / "kernels/cuda").iterdir()):
        if path.suffix == ".cu" or path.name == "prelude.cuh":
            text, found = mutants(path)
            first = len(places)
            text_of[path] = re.sub(r"@(\d+)@", lambda m: str(first + int(m.group(1))), text)
            places += found
    prelude, host = ROOT / "kernels/cuda/prelude.cuh", ROOT / "kernels/cuda/host.cc"
    text_of[prelude] = text_of[prelude].replace("#pragma once\n", ASKS, 1)
    text_of[host] = host.read_text() + ANSWERS
    keys = key(places)
    todo = [i for i, place in enumerate(places) if not options.only or place[0] in options.only]
    if options.list:
        print("\n".join(keys[i] for i in todo))
        return
    lines = [l for l in SURVIVORS.read_text().splitlines() if l and not l.startswith("#")]
    reasons = dict(line.split("  -- ", 1) for line in lines)
    if stale := [r for r in reasons if r not in keys]:
        sys.exit(f"mutants: {SURVIVORS.name} has places that are not there: {stale}")
    if options.sample:
        # By what a place is: kernels that come do not draw the others anew.
        drawn = lambda i: hashlib.sha256(f"{options.seed} {keys[i]}".encode()).digest()
        todo = sorted(todo, key=drawn)[: options.sample]
    if options.built:
        program = (TREE / "program").read_text()
    else:
        copy(text_of)
        program = build()
    began, took, wrong, tried = time.time(), {}, [], 0
    # Attention's tests are the longest.
    for i in sorted(todo, key=lambda i: (places[i][0].startswith("attention"), i)):
        if options.seconds and time.time() - began > options.seconds:
            break
        file = places[i][0]
        if file not in took:
            start = time.time()
            if not passes(program, file, -1, 3, 1800):
                sys.exit(f"mutants: {file}: its tests fail as it is")
            took[file] = time.time() - start
        limit = 60 + 10 * took[file]
        survives = passes(program, file, i, 1, limit) and passes(program, file, i, 3, limit)
        reason, tried = reasons.get(keys[i]), tried + 1
        said = "caught" if not survives else f"survives: {reason}" if reason else "SURVIVES"
        if survives != (reason is not None):
            wrong.append(keys[i])
            said += "" if survives else f", against {SURVIVORS.name}"
        print(f"{keys[i]}: {said}", flush=True)
    print(f"mutants: {tried} of {len(places)} tried in {time.time() - began:.0f} s, {len(wrong)} not as {SURVIVORS.name} says")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
