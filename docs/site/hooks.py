"""What mkdocs.yml asks of MkDocs beyond its plugins: the tree's own pages, in GitHub's Markdown, and a reference of the public C++ headers."""
import html
import json
import re
import sys
from pathlib import Path
from posixpath import join, normpath

import mdformat
from mkdocs.structure.files import File, InclusionLevel

sys.path.append(str(Path(__file__).parent))
import headers  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
# Of search results: those of other pages have 1.
_BOOSTS = {"docs/troubleshooting": 1.5, "docs/launching": 1.5, "docs/checkpoints": 1.5, "docs/migrating": 0.7,
           "README": 0.4, "docs/README": 0.3, "docs/architecture": 0.3, "CONTRIBUTING": 0.3, "reference/": 0.2, "CHANGELOG": 0.1}
_KEYS = "docs/configuration.md"
_KEY_ROW = re.compile(r"<tr>\s*<td><code>([\w.\[\]]+)</code></td>")
_LANGUAGES = {".cc": "cpp", ".h": "cpp", ".py": "python"}


def on_files(files, config):
    """Adds the pages with the paths that they have in the tree, so that links between them are right in both, and what they link to: pictures
    as they are, and sources as pages that show them."""
    linked = {normpath(join(page, "..", target)) for page in _PAGES for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8"))}
    for name in {*_PAGES, *linked}:
        path = ROOT / name
        if path.suffix in {".md", ".svg", ".png"} and path.is_file():
            files.append(File.generated(config, name, abs_src_path=str(path)))
        elif path.is_file():
            text = f"# {path.name}\n\n```{_LANGUAGES.get(path.suffix, path.suffix[1:])} title=\"{name}\"\n{path.read_text(encoding='utf-8')}```\n"
            files.append(File.generated(config, f"{name}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    for header in headers.public_headers(ROOT):
        files.append(File.generated(config, f"reference/cpp/{header}.md", content=headers.page(ROOT, header)))
    return files


def on_page_markdown(markdown, page, config, files):
    """GitHub's Markdown as Python-Markdown reads it: lists are indented by four. A link to a source becomes one to its page."""
    name = page.file.src_uri
    boost = next((boost for start, boost in _BOOSTS.items() if name.startswith(start)), 1)
    page.meta["search"] = {"boost": boost, "exclude": page.file.inclusion == InclusionLevel.NOT_IN_NAV}
    if name not in _PAGES:
        return None

    def to_page(match):
        target = match[1].partition("#")[0]
        return f"{match[1]}.md" if files.get_file_from_path(normpath(join(name, "..", f"{target}.md"))) else match[1]

    return mdformat.text(_LINK.sub(to_page, markdown), extensions={"mkdocs", "tables"}, options={"wrap": "keep"})


def on_page_content(content, page, config, files):
    """A bar in a table's code is no backslash and a bar. What has a type and no description has no dash. Each key of the configuration's
    tables has an anchor."""
    content = re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), content)
    content = re.sub(r'–\s*<div class="doc-md-description">\s*</div>', "", content)
    if page.file.src_uri != _KEYS:
        return content
    return _KEY_ROW.sub(lambda row: f'<tr><td id="{row[1]}"><code>{row[1].replace(".", ".<wbr>")}</code></td>', content)


def on_post_build(config):
    """Each key of the configuration's tables is a result of the search, beside the headings."""
    site = Path(config.site_dir)
    location = _KEYS.replace(".md", ".html")
    rows = re.findall(r'<tr><td id="(.*?)">(.*?)</tr>', (site / location).read_text(encoding="utf-8"), re.DOTALL)
    index = site / "search" / "search_index.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    found["docs"] += [{"location": f"{location}#{key}", "title": key, "text": html.unescape(re.sub("<.*?>", " ", row))} for key, row in rows]
    index.write_text(json.dumps(found), encoding="utf-8")
