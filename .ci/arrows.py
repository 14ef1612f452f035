"""The crate arrows, read from `cargo metadata`: who may depend on whom, and nobody else."""
import json
import subprocess
import sys

ALLOWED = {
    "quintet-collectives": set(),
    "quintet-kernels": {"quintet-collectives"},  # optional: feature `wire`
    "quintet-parallel-layers": {"quintet-collectives", "quintet-kernels"},
    "quintet-zero": {"quintet-collectives", "quintet-kernels"},
    "quintet-planner": {"quintet-collectives", "quintet-parallel-layers", "quintet-zero"},
    "quintet-ref-trainer": {
        "quintet-collectives", "quintet-kernels", "quintet-parallel-layers", "quintet-zero",
        "quintet-planner",
    },
}
LEAVES = {"quintet-benches", "quintet-fuzz", "quintet-driver-shim"}

text = subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--no-deps"])
packages = json.loads(text)["packages"]
faults = []
for package in packages:
    name = package["name"]
    ours = [d for d in package["dependencies"] if d["name"].startswith("quintet-")]
    for dependency in ours:
        if dependency["kind"] == "dev":
            continue
        target = dependency["name"]
        if target in LEAVES:
            faults.append(f"{name} depends on the leaf {target}")
        elif name not in LEAVES and target not in ALLOWED.get(name, set()):
            faults.append(f"{name} -> {target} is not an arrow of ARCHITECTURE.md")
        if name == "quintet-kernels" and not dependency["optional"]:
            faults.append("quintet-kernels -> quintet-collectives must be optional")
        if dependency.get("path") and dependency["req"] == "*":
            faults.append(f"{name} -> {target} has a path but no version")
missing = (set(ALLOWED) | LEAVES) - {p["name"] for p in packages}
faults += [f"{name} is missing" for name in missing]
print("\n".join(faults) or f"arrows: {len(packages)} crates, all as drawn")
sys.exit(bool(faults))
