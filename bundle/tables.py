"""The tables at the end of gpu_check.py, and what of them counts as a failure."""

NAMES = {"forward_backward": "forward + backward, pure bf16", "ddp": "DDP, bf16 autocast, fused AdamW", "fsdp2": "FSDP2, bf16, fused AdamW",
         "bf16": "pure bf16, fused AdamW", "bf16_compiled": "the same, compiled", **{f"stage_{stage}": f"bf16, stage {stage}" for stage in range(4)}}
REFERENCE = "ddp"
COLUMNS = (("step_ms", "step"), ("forward_ms", "forward"), ("backward_ms", "backward"), ("update_ms", "update"))


def name_of(row):
    world = f" ({row['backend']} x {row['ranks']})" if row["backend"] else ""
    return f"{row['engine']} {NAMES.get(row['way'], row['way'])}{world}"


def step_lines(part):
    reference = next((row["step_ms"] for row in part["rows"] if row["way"] == REFERENCE and "step_ms" in row), None)
    lines = ["", part["title"]]
    if any(row["ranks"] > 1 for row in part["rows"]):
        lines.append("(x N: N ranks share the device and the batch, each a part; other rows have one rank)")
    lines.append(f"{'ms, medians':52}" + "".join(f"{title:>10}" for _, title in COLUMNS) + f"{'x DDP':>8}{'peak GB':>9}{'loss':>8}")
    for row in part["rows"]:
        if "error" in row:
            lines.append(f"{name_of(row):52}  {row['error']}")
            continue
        ratio = f"{row['step_ms'] / reference:8.3f}" if reference else f"{'':8}"
        lines.append(f"{name_of(row):52}" + "".join(f"{row[key]:10.2f}" for key, _ in COLUMNS) + ratio + f"{row['peak_bytes'] / 1e9:9.2f}{row['loss']:8.3f}")
    return lines


def memory_lines(results):
    lines = ["", f"{'model state, MB':52}{'measured':>10}{'formula':>10}"]
    for part in results["steps"]:
        for row in part["rows"]:
            if "formula_bytes" in row:
                same = "" if row["state_bytes"] == row["formula_bytes"] else "  DIFFERENT"
                lines.append(f"{part['title'].split(',')[0] + ': ' + name_of(row):52}{row['state_bytes'] / 1e6:10.2f}{row['formula_bytes'] / 1e6:10.2f}{same}")
    return lines if len(lines) > 2 else []


def kernel_lines(results):
    if not results["kernels"]:
        return []
    lines = ["", f"{'kernels':52}{'GB/s':>10}{'x copy':>10}"]
    for one in results["kernels"]:
        lines.append(f"{one['name']:52}" + (f"{one['GB_per_s']:10.1f}{one['x_copy']:10.2f}" if one["GB_per_s"] else "  not measured"))
    return lines


def failures(results):
    """What of Tessera has failed, or was left out for lack of time, in a few words each. PyTorch's rows only show their errors: the
    compiled one needs a compiler and Python's headers."""
    found = [f"{test['name']}: {test['status']}" for test in results["tests"] if test["status"] != "passed"]
    for part in results["steps"]:
        for row in part["rows"]:
            if "error" in row:
                if row["engine"] == "Tessera":
                    found.append(f"{name_of(row)}: {row['error']}")
            elif "formula_bytes" in row and row["state_bytes"] != row["formula_bytes"]:
                found.append(f"{name_of(row)}: memory is not the formula's")
    return found


def render(results):
    lines = []
    if device := next((row["device_name"] for part in results["steps"] for row in part["rows"] if "device_name" in row), ""):
        lines += ["", f"{device}, driver {results['machine']['driver']}"]
    for part in results["steps"]:
        lines += step_lines(part)
    lines += memory_lines(results) + kernel_lines(results)
    if results["tests"]:
        lines += ["", f"tests: {sum(test['status'] == 'passed' for test in results['tests'])} of {len(results['tests'])} passed"]
    failed = failures(results)
    lines += ["", *(f"FAILED {one}" for one in failed), f"{'all passed' if not failed else 'NOT all passed'} in {results['seconds']} s"]
    return "\n".join(lines)
