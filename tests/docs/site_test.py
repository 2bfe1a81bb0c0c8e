"""The site of `make docs`: it is built without a warning, its links lead somewhere, it shows what the sources say, it fits phones and screens in both
colours, and its search answers. `make test-docs` runs it. SCREENSHOTS=folder saves pictures to look at."""
import ast
import functools
import html.parser
import http.server
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import CHROMIUM, HEADLESS, ROOT  # noqa: E402

QUESTIONS = {  # what a stranger types -> the page that answers, the first hit
    "out of memory": "docs/memory", "resume on another number of ranks": "docs/checkpoints", "DeepSpeed config": "docs/configuration", "LoRA": "docs/gallery",
    "/dev/shm": "docs/troubleshooting", "consolidate to safetensors": "docs/checkpoints", "stage 3 slow": "docs/troubleshooting", "Slurm": "docs/launching",
    "gradient accumulation": "docs/configuration", "offload to disk": "docs/offload", "8-bit Adam": "docs/optimizers", "zero_optimization.stage": "docs/configuration"}
# The page that drives others in a frame. It sends what the script returns to the test.
DRIVER = """<!doctype html><body style="margin:0"><iframe style="border:0"></iframe><script>
const frame = document.querySelector("iframe"), sleep = ms => new Promise(done => setTimeout(done, ms));
const open = (page, width) => new Promise(done => { frame.width = width; frame.height = 900; frame.onload = () => done(frame.contentWindow); frame.src = page; });
(async () => { %s })().catch(error => ({ error: String(error.stack) })).then(answer =>
  fetch("http://127.0.0.1:%d/", { method: "POST", mode: "no-cors", body: JSON.stringify(answer) }));
</script>"""
SEARCH = """const view = await open("index.html", 1600), find = name => view.document.querySelector(name), first = {};
const field = find("[data-md-component=search-query]"), list = find(".md-search-result__list");
find("#__search").click();
field.focus();
for (const question of %s) {
  list.replaceChildren();
  field.value = question;
  field.dispatchEvent(new view.KeyboardEvent("keyup", { bubbles: true }));
  for (let i = 0; i < 500 && !list.querySelector("a"); ++i) await sleep(10);
  first[question] = list.querySelector("a")?.pathname;
}
return { first, requests: view.performance.getEntriesByType("resource").map(entry => entry.name) };"""
WIDTHS = """const wide = [], colours = [];
for (const page of %s)
  for (const width of [400, 1600]) {
    const { documentElement, body } = (await open(page, width)).document;
    if (documentElement.scrollWidth > width || !body.innerText) wide.push([page, width, documentElement.scrollWidth]);
  }
const { document: { body }, getComputedStyle } = frame.contentWindow;
for (let i = 0; i < 2; ++i, body.querySelector("[data-md-component=palette] label:not([hidden])").click(), await sleep(500))
  colours.push([getComputedStyle(body).backgroundColor, getComputedStyle(body).color].map(colour => Math.max(...colour.match(/\\d+/g).slice(0, 3))));
return { wide, colours };"""


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        to = attributes.get("href") or attributes.get("src")
        if to and attributes.get("rel") != "canonical":
            (self.links if tag == "a" else self.loaded).append(to)


class Server(http.server.SimpleHTTPRequestHandler):
    answers = queue.Queue()

    def do_POST(self):  # noqa: N802
        self.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@unittest.skipUnless(importlib.util.find_spec("mkdocs"), "MkDocs is not installed here; make test-docs installs it into .deps/venv-docs and runs this")
class SiteTest(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="tessera_docs_")))
        cls.site = cls.folder / "site"
        cls.built = subprocess.run([sys.executable, "-B", "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "docs/site/mkdocs.yml", "--site-dir", cls.site],
                                   env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False)
        if not CHROMIUM:
            raise AssertionError("no Chromium on this machine, in which the search and the layout are tested; expected the Debian package chromium")
        cls.pages = {path.relative_to(cls.site).as_posix(): Page(path) for path in cls.site.rglob("*.html") if path.name != "404.html"}
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=cls.site))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cls.addClassCleanup(server.server_close)
        cls.addClassCleanup(server.shutdown)
        cls.port = server.server_address[1]

    def ask(self, script, base):
        """What the script returns that runs in Chromium, with pages from `base`."""
        Server.answers = queue.Queue()  # not the answer to an earlier question, which came too late
        (self.site / "driver.html").write_text(DRIVER % (script, self.port))
        browser = subprocess.Popen([*HEADLESS, "--allow-file-access-from-files",
                                    f"--user-data-dir={self.folder / 'profile'}", "--window-size=1700,1000", f"{base}/driver.html"], stderr=subprocess.DEVNULL)
        try:
            answer = json.loads(Server.answers.get(timeout=240))
        finally:
            browser.terminate()
            browser.wait()
            (self.site / "driver.html").unlink()
        self.assertNotIn("error", answer)
        return answer

    def test_is_built_without_a_warning(self):
        self.assertEqual(self.built.returncode, 0, self.built.stderr)
        self.assertNotRegex(self.built.stderr, "WARNING|ERROR")
        self.assertGreater(len(self.pages), 40)

    def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(self):
        wrong = []
        for name, page in self.pages.items():
            for link in page.links + page.loaded:
                to = urlsplit(link)
                if to.scheme or to.netloc:
                    wrong += [(name, link)] if link in page.loaded else []
                    continue
                target = os.path.normpath(Path(name).parent / unquote(to.path)) if to.path else name
                if not (self.site / target).is_file() or to.fragment and target in self.pages and unquote(to.fragment) not in self.pages[target].ids:
                    wrong.append((name, link))
        self.assertEqual(wrong, [])

    def test_pages_have_all_that_their_markdown_has(self):
        from markdown_it import MarkdownIt

        def counts(text):
            return {tag: len(re.findall(rf"<{tag}[ >]", text)) for tag in ("h1", "h2", "h3", "li", "p", "pre", "tr", "img")}

        def words(text):
            return "".join(html.unescape(re.sub(r"<[^>]*>|&para;", "", text)).split())

        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
            page = path.relative_to(ROOT).as_posix().replace("README.md", "index.md").replace(".md", ".html")
            article = re.search(r"<article.*?>(.*)</article>", self.pages[page].text, re.DOTALL)[1]
            expected = MarkdownIt("commonmark").enable("table").render(path.read_text(encoding="utf-8"))
            with self.subTest(page):
                self.assertEqual(counts(article), counts(expected))
                self.assertEqual(words(article), words(expected))

    def test_the_reference_has_every_public_name(self):
        names = next(ast.literal_eval(node.value) for node in ast.parse((ROOT / "python/tessera/__init__.py").read_text(encoding="utf-8")).body
                     if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
        ids = {str(one).rpartition(".")[2] for name, page in self.pages.items() if name.startswith("reference/") for one in page.ids}
        self.assertEqual(set(names) - ids - {"__version__", "optim"}, set())
        self.assertLessEqual({"backward", "save_checkpoint", "full_parameter", "AdamW8bit", "DeepSpeedEngine"}, ids)
        for header in re.findall(r'^#include "(.*)"', (ROOT / "tessera.h").read_text(encoding="utf-8"), re.MULTILINE):
            classes = re.findall(r"^(?:class|struct) (\w+)[^;]*?\{", (ROOT / header).read_text(encoding="utf-8"), re.MULTILINE)
            self.assertLessEqual({name.lower() for name in classes}, self.pages[f"reference/cpp/{header}.html"].ids, header)

    def test_every_key_of_the_configuration_is_found(self):
        keys = re.findall(r"^\| `([\w.\[\]]+)` \|", (ROOT / "docs/configuration.md").read_text(encoding="utf-8"), re.MULTILINE)
        index = json.loads((self.site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
        page = next(name for name in self.pages if name.endswith("/configuration.html"))
        self.assertEqual([one["title"] for one in index if one["location"] == f"{page}#{one['title']}"], keys)
        self.assertLessEqual(set(keys), self.pages[page].ids)
        self.assertGreater(len(keys), 300)

    def test_search(self):
        """From the disk, and from a server. What has been typed so far, one letter, finds something too."""
        letters = "bcdefghjklmnopqrstuvwxyz0123456789"
        for base in (self.site.as_uri(), f"http://127.0.0.1:{self.port}"):
            found = self.ask(SEARCH % json.dumps([*letters, *QUESTIONS]), base)
            with self.subTest(base):
                self.assertEqual([letter for letter in letters if letter not in found["first"]], [])
                pages = {question: found["first"].get(question, "").removeprefix(urlsplit(base).path + "/").removesuffix(".html") for question in QUESTIONS}
                self.assertEqual(pages, QUESTIONS)
                self.assertEqual([name for name in found["requests"] if not name.startswith((base, "data:", "blob:"))], [])

    def test_pages_fit_phones_and_screens_in_both_colours(self):
        answer = self.ask(WIDTHS % json.dumps(list(self.pages)), self.site.as_uri())
        self.assertEqual(answer["wide"], [])
        (light, text_on_light), (dark, text_on_dark) = answer["colours"]
        self.assertTrue(light > 200 > 100 > dark and text_on_light < 100 and text_on_dark > 150, answer)

    @unittest.skipUnless("SCREENSHOTS" in os.environ, "SCREENSHOTS names no folder")
    def test_screenshots(self):
        for page in ("index", "docs/configuration", "docs/performance", "reference/engine", "reference/cpp/engine/engine.h"):
            for width, colours in ((400, "light"), (400, "dark"), (1600, "light"), (1600, "dark")):
                picture = Path(os.environ["SCREENSHOTS"]).resolve() / f"{page.replace('/', '-')}-{width}-{colours}.png"
                picture.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run([*HEADLESS, "--hide-scrollbars", f"--user-data-dir={self.folder / colours}",
                                f"--blink-settings=preferredColorScheme={int(colours == 'light')}", f"--window-size={width},1400", "--virtual-time-budget=5000",
                                f"--screenshot={picture}", (self.site / f"{page}.html").as_uri()], stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    unittest.main()
