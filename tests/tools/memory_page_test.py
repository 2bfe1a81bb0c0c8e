"""The page of `tessera memory` in headless Chromium: its numbers beside those of --estimate and of memory.json, its controls, its size. Skips
where there is no Chromium."""
import html
import json
import random
import re
import subprocess
import unittest
import xml.etree.ElementTree as ElementTree

from tool import CHROMIUM, HEADLESS, ROOT, ToolTest

PARTS = ["parameters", "gradients", "master", "optimizer"]
# Is put into the page: `answer` is what the test reads.
DRIVER = """<script>
const set = (id, value) => { const one = document.getElementById(id); one.value = value; one.dispatchEvent(new Event("input")); };
const text = id => { const one = document.getElementById(id); return one ? one.textContent : ""; };
const key = (element, name) => element.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
(async () => {
  let answer;
  try { answer = await (async () => { %s })(); } catch (error) { answer = { error: String(error) }; }
  const pre = document.createElement("pre");
  pre.id = "answer", pre.textContent = JSON.stringify({ answer, errors: window.testErrors });
  document.body.replaceChildren(pre);
})();
</script></body>"""


@unittest.skipUnless(CHROMIUM, "no Chromium on this machine (Debian package chromium)")
class PageTest(ToolTest):
    def ask(self, script, folder="m"):
        """What the script returns that runs at the end of the page."""
        page = (self.folder / folder / "memory.html").read_text()
        page = page.replace("<head>", "<head><script>window.testErrors = []; addEventListener('error', e => testErrors.push(e.message));</script>", 1)
        driven = self.folder / "driven.html"
        driven.write_text(page.replace("</body>", DRIVER.replace("%s", script)))
        outcome = subprocess.run([*HEADLESS, f"--user-data-dir={self.folder / 'profile'}", "--window-size=1200,900",
                                  "--virtual-time-budget=60000", "--dump-dom", driven.as_uri()], capture_output=True, text=True, timeout=120, check=True)
        found = re.search(r'<pre id="answer">(.*?)</pre>', outcome.stdout, re.S)
        self.assertIsNotNone(found, outcome.stdout[-2000:])
        result = json.loads(html.unescape(found[1]))
        self.assertEqual(result["errors"], [])
        if isinstance(result["answer"], dict):
            self.assertNotIn("error", result["answer"])
        return result["answer"]

    def rows(self, out):
        """The tables of --estimate, by stage: in memory, on CPU ranks, on GPUs."""
        tables = out.split("The same")
        return [{int(line.split()[1]): line.split()[2:] for line in table.splitlines() if line.startswith("stage ")} for table in tables]

    def test_500_settings_have_the_numbers_of_estimate(self):
        params = "487654321"
        self.assert_succeeded(self.run_tool("memory", "--estimate", "--params", params, "--world", 8, "--precision", "fp32", "--out", "m"))
        source = random.Random(3)
        worlds = [1, 3, 50_000, *(source.randrange(4, 5000) for _ in range(2))]
        tiers = ["memory", "optimizer_disk", "all_disk", "gpu_optimizer_host", "gpu_all_host", "gpu_all_disk"]
        settings = [(source.choice(worlds), source.choice(["fp32", "bf16", "fp16"]), source.randrange(4), source.choice(tiers)) for _ in range(500)]
        script = "const settings = " + json.dumps(settings) + """;
          return settings.map(([ranks, precision, stage, tiers]) => {
            set("ranks", ranks), set("precision", precision), set("gradients", "fp32"), set("stage", stage), set("tiers", tiers);
            const shown = {};
            for (const cell of document.querySelectorAll("#result td[id]")) shown[cell.id] = cell.textContent;
            set("gradients", precision);
            shown.narrow = text("total-device");
            return shown;
          });"""
        estimates = {}
        for (world, precision, stage, where), shown in zip(settings, self.ask(script)):
            if (world, precision) not in estimates:
                outcome = self.run_tool("memory", "--estimate", "--params", params, "--world", world, "--precision", precision)
                self.assert_succeeded(outcome)
                self.assertIn("MB (10^6 bytes)", outcome.out)
                estimates[world, precision] = self.rows(outcome.out)
            memory, on_cpus, on_gpus = estimates[world, precision]
            message = (world, precision, stage, where, shown)
            if where == "memory":
                self.assertEqual([shown[f"{part}-device"] for part in [*PARTS, "total"]], memory[stage][:5], message)
                if precision != "fp32":
                    self.assertEqual(shown["narrow"], memory[stage][5], message)
                continue
            table, place = (on_cpus, tiers.index(where) - 1) if "gpu" not in where else (on_gpus, tiers.index(where) - 3)
            above, below = table[stage][2 * place:2 * place + 2]
            self.assertEqual(shown.get("total-device", "-"), above, message)
            self.assertEqual(shown.get("total-host", shown.get("total-disk", "-")), below, message)

    def test_pictures_are_saved(self):
        """With heading and legend, in colours that every program knows, and of twice the pixels as PNG."""
        self.write("c.json", self.config(train_batch_size=None, train_micro_batch_size_per_gpu=4))
        self.assert_succeeded(self.run_tool("memory", "c.json", "--steps", 1, "--stages", "0,2", "--nproc", 2, "--out", "m"))
        saved = self.ask("""
          const files = [];
          window.saveAs = async (blob, name) => files.push([name, blob.type, blob.type === "image/svg+xml" ? await blob.text()
            : [...new Uint8Array(await blob.arrayBuffer(), 16, 8)]]);
          for (const button of document.querySelectorAll(".saving button")) button.click();
          while (files.length < 8) await new Promise(done => setTimeout(done, 10));
          return files;""")
        pictures = {name: text for name, kind, text in saved if kind == "image/svg+xml"}
        self.assertEqual(set(pictures), {"stage_0.svg", "stage_2.svg", "memory_of_a_rank_at_the_peak_of_a_step.svg", "memory_of_a_rank_at_each_stage.svg"})
        pixels = {name: [int.from_bytes(bytes(head[i:i + 4]), "big") for i in (0, 4)] for name, kind, head in saved if kind == "image/png"}
        for name, text in pictures.items():
            root = ElementTree.fromstring(text)
            size = [float(root.get(side)) for side in ("width", "height")]
            self.assertEqual(pixels[name.replace(".svg", ".png")], [2 * side for side in size])
            words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
            self.assertRegex(words[0], r"^stage \d: peak [\d.]+ [kM]B|^Memory of a rank at the peak of a step$|^Memory of a rank at each stage: 2 ranks, fp32, all in memory$")
            self.assertTrue({"parameters", "gradients", "optimizer state"} <= set(words), words)
            drawn = [element for element in root.iter() if element.tag.split("}")[1] in ("rect", "path", "line", "text")]
            self.assertGreater(len(drawn), 20)
            for element in drawn:
                self.assertRegex(element.get("stroke" if element.tag.endswith("line") else "fill"), r"^#[0-9a-f]{6}$|^rgb\(\d+, \d+, \d+\)$")
            self.assertNotRegex(text, r"var\(|class=|cursor")

    def test_the_limit_of_an_estimate(self):
        self.assert_succeeded(self.run_tool("memory", "--estimate", "--params", "7.5e9", "--world", 64, "--fit", "80GB", "--out", "m"))
        found = self.ask("""const first = [text("headline"), document.getElementById("limit").value, text("verdict")];
          set("stage", 2);
          const second = text("verdict");
          set("limit", 16.5);
          return [...first, second, text("verdict"), document.querySelectorAll("#measured *").length];""")
        self.assertEqual(found, ["Stage 3 saves 98 % of model state on 64 ranks: 135.0 GB → 2.1 GB a rank. Stage 1 and those above fit into 80 GB.", "80",
                                 "46.4 GB of model state: fits on 80 GB.", "16.9 GB of model state: fits on 80 GB.",
                                 "16.9 GB of model state: does not fit on 16.5 GB; 375.0 MB are missing.", 0])

    def test_the_headline_of_an_estimate(self):
        """Without --world it has the fewest ranks on which a stage fits; without --fit no limit; and never "100 %"."""
        for options, headline, stage in (
                (["--fit", "24GB"], "Stage 3 saves 83 % of model state on 6 ranks: 126.0 GB → 21.0 GB a rank. Stage 3 fits into 24 GB.", "3"),
                (["--world", 4], "Stage 3 saves 75 % of model state on 4 ranks: 126.0 GB → 31.5 GB a rank.", "0"),
                (["--world", 1024], "Stage 3 saves 99.9 % of model state on 1024 ranks: 126.0 GB → 123.0 MB a rank.", "0"),
                (["--world", 4, "--mics-shard-size", 2], "Stage 3 saves 75 % of model state on 4 ranks: 126.0 GB → 31.5 GB a rank. Groups of ranks are not counted in it.", "0")):
            self.assert_succeeded(self.run_tool("memory", "--estimate", "--params", "7e9", *options, "--out", "m"))
            self.assertEqual(self.ask('return [text("headline"), document.getElementById("stage").value];'), [headline, stage])

    def test_the_state_of_optimizers_of_whole_parameters(self):
        """Their owners keep it in memory, at every stage: the page has the bytes of --estimate, also where it was measured."""
        self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 4, "hidden": 1024}, train_batch_size=None,
                                         train_micro_batch_size_per_gpu=4, optimizer={"type": "AdamW8bit"}))
        words = """return [0, 1, 2, 3].map(stage => (set("stage", stage), [text("optimizer-device"), text("total-device")]));"""
        for estimate in (["--params", "7e9", "--optimizer", "AdamW8bit", "--fit", "80GB"], ["c.json"]):
            outcome = self.run_tool("memory", "--estimate", *estimate, "--world", 2, "--out", "m")
            self.assert_succeeded(outcome)
            memory = self.rows(outcome.out)[0]
            self.assertGreater(float(memory[0][3]), 0)
            self.assertEqual(self.ask(words), [[memory[stage][3], memory[stage][4]] for stage in range(4)])
        self.assert_succeeded(self.run_tool("memory", "c.json", "--steps", 1, "--stages", "2", "--nproc", 2, "--out", "measured"))
        trials = json.loads((self.folder / "measured" / "memory.json").read_text())["trials"]
        script = "return [stateBytes({ stage: 2, tiers: 'memory', precision: 'fp32', gradients: 'fp32', ranks: 2 }).device.optimizer, text('notes')];"
        bytes_of_two, notes = self.ask(script, "measured")
        self.assertAlmostEqual(bytes_of_two / max(trial["held"]["optimizer"] for trial in trials), 1, delta=0.1)
        self.assertIn("is what the optimizer had at that moment beside its state by formula", notes)

    def test_all_stages_of_an_estimate(self):
        """The picture has --estimate's numbers, and follows the setting; what a stage cannot have is said."""
        estimate = self.run_tool("memory", "--estimate", "--params", "7e9", "--world", 4, "--fit", "24GB", "--out", "m")
        self.assert_succeeded(estimate)
        words = """[...document.querySelectorAll("#stages text")].map(one => one.textContent)"""
        found = self.ask(f"""const first = {words}, marks = document.querySelectorAll("#stages .process").length;
          set("tiers", "optimizer_disk");
          return [first, marks, {words}];""")
        memory, on_cpus, _ = self.rows(estimate.out.split("The smallest number")[0])
        self.assertEqual(found[:2], [[words for stage in range(4) for words in (f"stage {stage}", f"{memory[stage][4]} GB")], 4])
        self.assertEqual(found[2], ["stage 0", "has nothing of what is to lie elsewhere",
                                    *(words for stage in range(1, 4) for words in (f"stage {stage}", f"{on_cpus[stage][0]} GB", "disk", f"{on_cpus[stage][1]} GB on disk"))])

    def test_what_ranks_share_is_said(self):
        """The headline, the bars and the what-if of ranks that share one copy of the parameters, beside the numbers of ranks that share nothing."""
        self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 4, "hidden": 256}, zero_optimization={"stage": 2},
                                         train_batch_size=None, train_micro_batch_size_per_gpu=4))
        peaks, found = {}, {}
        for backend in ("shm", "gloo"):
            self.assert_succeeded(self.run_tool("memory", "c.json", "--steps", 1, "--nproc", 2, "--out", backend, "--set", f"comm.backend={backend}"))
            trials = json.loads((self.folder / backend / "memory.json").read_text())["trials"]
            peaks[backend] = [max((t["peak"] for t in trials if t["stage"] == stage), key=lambda peak: peak["total"]) for stage in range(4)]
            found[backend] = self.ask("""return { headline: text("headline"), notes: text("notes"), sum: +document.getElementById("sum-device").dataset.bytes,
              first: document.querySelector("#measured h2").textContent, meanings: [...document.querySelectorAll(".meanings li")].map(one => one.textContent),
              apart: RUNS.map(run => unsharedState(run) && unsharedState(run).total),
              labels: [...document.querySelectorAll("#measured section:first-child svg text")].map(one => one.textContent) };""", backend)
        for backend, page in found.items():
            least = next(p for p in peaks[backend] if p["total"] <= 1.01 * min(peak["total"] for peak in peaks[backend]))
            stage, percent = peaks[backend].index(least), round(100 * (1 - least["total"] / peaks[backend][0]["total"]))
            self.assertTrue(page["headline"].startswith(f"Stage {stage} saves {percent} % here: "), page["headline"])
            self.assertEqual(page["first"], "Stages beside each other")
            self.assertTrue(len(page["meanings"]) >= 4 and all(re.fullmatch(r"[a-z ]+: .+\.", line) for line in page["meanings"]), page["meanings"])
            self.assertEqual("unshared" in page["labels"], backend == "shm")
            self.assertEqual("On ranks that share no memory" in page["headline"], backend == "shm")
            self.assertIn("The peak that was measured in this setting is", page["notes"])
        self.assertIn("is the copy of the parameters that ranks of one host share", found["shm"]["notes"])
        self.assertNotIn("share", found["gloo"]["notes"])
        for apart, measured in zip(found["shm"]["apart"], peaks["gloo"]):  # what ranks over Gloo have, but for padding
            state = sum(measured[part] for part in ("parameters", "gradients", "master", "optimizer"))
            self.assertAlmostEqual(apart / state, 1, delta=0.01)

    def test_a_snapshot_and_groups_of_ranks(self):
        """The snapshot is model state, which more ranks divide; what is not counted is said."""
        self.write("c.json", self.config(model={"type": "fashion_mnist_cnn", "channels": 4, "hidden": 256}, train_batch_size=None, train_micro_batch_size_per_gpu=4))
        words = """const bytes = () => +document.getElementById("total-device").dataset.bytes;
          return [bytes(), (set("ranks", 20), bytes()), text("notes")];"""
        for key, stage in (("checkpoint.async=true", 0), ("zero_optimization.mics_shard_size=2", 3)):
            changes = ["--set", key, "--set", "comm.backend=gloo", "--set", f"zero_optimization.stage={stage}"]
            outcome = self.run_tool("memory", "c.json", "--steps", 1, "--nproc", 2, "--stages", stage, "--out", "m", "--compare", *changes)
            self.assertEqual((outcome.code, "failed" in outcome.err), (0, False), outcome)
            formula = json.loads((self.folder / "m" / "memory.json").read_text())["trials"][0]["formula"]
            first, many, notes = self.ask(words)
            self.assertAlmostEqual(first / formula["total"], 1, delta=0.01)  # padding
            self.assertAlmostEqual((first - many) / (0.9 * formula["snapshot" if stage == 0 else "total"]), 1, delta=0.01)
            self.assertEqual("Groups of ranks (mics_shard_size, zero_hpz_partition_size) are not counted" in notes, stage == 3)

    def test_numbers_that_cannot_be_are_refused(self):
        self.assert_succeeded(self.run_tool("memory", "--estimate", "--params", "1e9", "--world", 2, "--out", "m"))
        typed = [["ranks", "0"], ["ranks", ""], ["ranks", "2.5"], ["ranks", "2"], ["limit", "0"], ["limit", "80"]]
        shown = self.ask("return " + json.dumps(typed) + """.map(([id, value]) =>
          (set(id, value), [text("verdict"), document.querySelectorAll("#result td[id]").length > 0]));""")
        ranks = ["Ranks: expected a whole number from 1 to 1073741824.", False]
        self.assertEqual(shown[:3] + shown[4:5], [ranks] * 3 + [["Memory of a rank, GB (10^9 bytes): expected a number of at least 0.000001.", False]])
        self.assertTrue(all(has_numbers for _, has_numbers in (shown[3], shown[5])), shown)

    def test_the_page_of_a_measurement(self):
        self.write("c.json", self.config(model={"type": "gpt", "dim": 64, "layers": 3, "heads": 4, "vocabulary": 256, "sequence": 64},
                                         data={"type": "text", "path": str(ROOT / "LICENSE"), "test_fraction": 0.2},
                                         train_batch_size=None, train_micro_batch_size_per_gpu=4, zero_optimization={"stage": 2}))
        self.assert_succeeded(self.run_tool("memory", "c.json", "--steps", 1, "--nproc", 2, "--out", "m", "--compare", "--set", "comm.backend=gloo"))
        page = (self.folder / "m" / "memory.html").read_text()
        self.assertLess(len(page.encode()), 1_000_000)
        self.assertEqual(set(re.findall(r"https?://[^\s\"'<]*", page)), {"http://www.w3.org/2000/svg"}, "nothing is fetched")
        self.assertNotRegex(page, r"<link|<script src|<img|@import|fetch\(|url\(")
        trials = json.loads((self.folder / "m" / "memory.json").read_text())["trials"]
        largest = [max((t for t in trials if t["stage"] == stage), key=lambda t: t["peak"]["total"]) for stage in range(4)]

        found = self.ask("""
          const titles = [...document.querySelectorAll("section.run h3")].map(one => one.textContent);
          const numbers = id => +document.getElementById(id).dataset.bytes, value = id => document.getElementById(id).value;
          const before = { batch: value("batch"), stage: value("stage"), verdict: text("verdict"), sum: numbers("sum-device") };
          const start = { activations: numbers("activations-device"), rest: numbers("rest-device"), state: numbers("total-device") };
          set("batch-slider", 2);
          const half = { batch: document.getElementById("batch").value, activations: numbers("activations-device"), notes: text("notes") };
          set("batch-slider", 4); set("policy", "block");
          const block = { activations: numbers("activations-device"), notes: text("notes") };
          set("policy", "none"); set("ranks-slider", 6);
          const many = { ranks: document.getElementById("ranks").value, state: numbers("total-device") };
          const plot = document.querySelector(".plot"), told = plot.nextElementSibling, heard = [];
          for (const name of ["p", "ArrowDown", "ArrowDown", "ArrowRight", "Home"]) key(plot, name), heard.push(told.textContent);
          const box = plot.getBoundingClientRect(), hovered = new Set();
          for (let x = 60; x < box.width; x += 7) for (let y = 25; y < 230; y += 5) {
            plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
            hovered.add(told.textContent.replace(/^[^.]*\\d ms, /, ""));
          }
          const unnamed = [...document.querySelectorAll("input, select")].filter(one => !one.labels.length && !one.hasAttribute("aria-label")).map(one => one.id);
          const wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
          return { titles, before, start, half, block, many, heard, hovered: [...hovered], unnamed, wide, value: plot.getAttribute("aria-valuetext"),
                   captions: [...document.querySelectorAll("caption")].map(one => one.textContent), cuts: plot.querySelectorAll("line.cut").length };""")
        for stage, trial in enumerate(largest):
            amount, unit = re.search(r"peak ([\d.]+) ([kM])B", found["titles"][stage]).groups()
            self.assertAlmostEqual(float(amount) * {"k": 1e3, "M": 1e6}[unit] / trial["peak"]["total"], 1, delta=0.01)
        own = largest[2]
        self.assertEqual(found["before"]["stage"], "2")
        self.assertEqual(found["before"]["batch"], "4")
        self.assertEqual(found["start"]["activations"], own["peak"]["activations"])
        self.assertEqual(found["start"]["rest"], own["peak"]["communication"] + own["peak"]["other"])
        self.assertEqual(found["before"]["sum"], sum(found["start"].values()))
        self.assertIn("fits on 1 GB", found["before"]["verdict"])
        self.assertEqual(found["half"]["batch"], "2")
        self.assertLess(found["half"]["activations"], 0.75 * own["peak"]["activations"])
        self.assertIn("Activations and workspace: measured.", found["half"]["notes"])
        self.assertLess(found["block"]["activations"], 0.8 * own["peak"]["activations"])
        self.assertEqual(found["many"]["ranks"], "64")
        self.assertLess(found["many"]["state"], found["start"]["state"])
        self.assertIn("This is the peak", found["heard"][0])
        self.assertRegex(found["heard"][1], r"1 of \d+: ")
        self.assertNotEqual(found["heard"][1], found["heard"][2])
        self.assertRegex(found["heard"][4], r"^0\.\d+ ms, ")
        hovered = "\n".join(found["hovered"])
        for word in ("unit: unit 0", "module: ", "operator: aten::", "Backward0", "of optimizer state", "of parameters", "of activations"):
            self.assertIn(word, hovered)
        self.assertEqual(found["unnamed"], [])
        self.assertTrue(found["wide"], "the page is not wider than the window")
        self.assertEqual(found["cuts"], 4, "where forward, backward and step begin, and the end")
        self.assertTrue(any("alive at the peak" in caption for caption in found["captions"]))
        labels = " ".join(found["titles"])
        for variant in ("recomputation cheap", "recomputation block", "optimizer on disk"):
            self.assertIn(variant, labels)

        trace = json.loads((self.folder / "m" / "memory_trace.json").read_text())["traceEvents"]
        self.assertEqual({event["ph"] for event in trace}, set("MXCbe"))
        begun, ended = ([(event["pid"], event["cat"], event["id"]) for event in trace if event["ph"] == kind] for kind in "be")
        self.assertEqual(sorted(begun), sorted(ended))
        peaks = [max(sum(event["args"].values()) for event in trace if event["ph"] == "C" and event["pid"] == pid) for pid in range(4)]
        for peak, trial in zip(peaks, largest):
            self.assertAlmostEqual(peak / trial["peak"]["total"], 1, delta=0.01)


if __name__ == "__main__":
    unittest.main()
