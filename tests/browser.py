"""Looks at the built documentation in headless Chromium: `python -m tests.browser docs/_build/html`.

Every page on a phone and on a screen, in light and in dark: errors on the console, horizontal scrolling, pictures that
did not load, contrast below WCAG 2.1 AA. And searches: each must list its page among the first five. Needs selenium,
Chromium and its driver. `--pictures FOLDER` keeps screenshots.
"""

import argparse
import functools
import http.server
import itertools
import json
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VIEWS = ((390, "light"), (390, "dark"), (1440, "light"), (1440, "dark"))  # pixels, colors
# Pages that are loaded anew for each view, and of which screenshots are kept.
PAGES = ("index", "start", "gallery", "concepts", "guides/tour", "guides/index", "guides/finetune", "guides/sharding",
         "guides/troubleshooting", "api/nn", "api/training", "api/objects/nn.Attention", "api/objects/training.Trainer", "cards/llama", "models", "plans", "notebooks/plan_70b",
         "notebooks/experts")  # fmt: skip
SOURCES, SOURCE = (
    "_modules/",
    "_modules/maxlib/nn/attention/_grouped_query",
)  # hundreds of pages that differ in their text only
OBJECTS, EACH = "api/objects/", 12  # so do these; every twelfth is looked at
# What people type, and the page that answers. `tests/test_docs.py` checks without a browser that the words are there.
SEARCHES = {
    "getting started": "start",
    "quickstart": "guides/tour",
    "crash": "guides/checkpoints",
    "fine-tune": "guides/finetune",
    "sft": "guides/finetune",
    "lora": "guides/adapters",
    "ablate": "guides/look-inside",
    "scaling law": "guides/training",
    "flash attention": "guides/attention",
    "out of memory": "guides/memory",
    "multi-host": "guides/launch",
    "resume": "guides/checkpoints",
    "tokenizer": "guides/data",
    "chat template": "guides/generation",
    "quantize": "guides/quantization",
    "gguf": "guides/weights",
    "wandb": "guides/observability",
    "mixture of experts": "guides/moe",
    "context parallel": "guides/parallelism",
    "loss spike": "guides/debug",
    "nan": "guides/debug",
    "hang": "guides/debug",
    "slow host": "guides/debug",
    "corrupt checkpoint": "guides/checkpoints",
    "preemption": "guides/launch",
    "mixed precision": "guides/training",
    "custom layer": "guides/add-a-layer",
    "rwkv": "guides/add-a-layer",
    "supported models": "models",
    "maxtext": "coming-from/maxtext",
    "dataloader": "coming-from/pytorch",
    "vllm": "guides/weights",
    "export": "guides/weights",
    "dpo": "guides/dpo",
    "tensor parallel": "guides/parallelism",
    "own parallelism": "guides/add-a-strategy",
    "gradient checkpointing": "guides/memory",
    "vram": "guides/memory",
    "own loss": "guides/loss",
    "custom loss": "guides/loss",
    "elastic": "guides/launch",
    "multi-node": "guides/launch",
    "interpretability": "guides/look-inside",
    "gemma": "cards/gemma",
    "load gemma": "cards/gemma3",
    "llama": "cards/llama",
    "deepseek": "cards/deepseek",
    "RMSNorm": "api/objects/nn.RMSNorm",
    "from_pretrained": "api/objects/from_pretrained",
    "Trainer": "api/objects/training.Trainer",
    "swap attention": "guides/change-a-model",
    "v5e-16": "guides/plan",
    "simulate devices": "guides/sharding",
    "fake devices": "guides/sharding",
    "pretend devices": "guides/sharding",
    "loss spike report": "notebooks/run_report",
}
FIRST = 5  # results within which the page has to be
# Texts whose contrast with the background below them is less than 4.5, or 3 for large ones.
CONTRAST = """
const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = e => { const layers = [];
  for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0) { layers.push(c); if (c[3] === 1) break; } }
  return layers.reverse().reduce((below, c) => over(c, below), [255, 255, 255]); };
const found = {};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let n; (n = walker.nextNode());) {
  const e = n.parentElement, s = getComputedStyle(e), box = e.getBoundingClientRect();
  if (!n.data.trim() || e.closest("script,style,svg,iframe,noscript,.headerlink,mjx-container") || s.visibility === "hidden" || box.width < 2 || box.height < 2) continue;
  const below = ground(e), ink = over(parse(s.color), below), a = light(ink), b = light(below);
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(s.fontSize);
  const large = size >= 24 || (size >= 18.66 && s.fontWeight >= 700);
  if (ratio < (large ? 3 : 4.5)) found[`${s.color} on ${below.map(Math.round)}`] = `${ratio.toFixed(2)}: ${n.data.trim().slice(0, 30)}`;
}
return found;
"""
# What reaches beyond the right edge, and is not within something that scrolls by itself; the theme hides it.
WIDER = """
const most = document.documentElement.clientWidth;
const scrolls = e => { for (; e && e.tagName !== "ARTICLE"; e = e.parentElement) if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true; return false; };
const right = e => { const box = e.getBoundingClientRect(); return box.left + Math.max(box.width, e.scrollWidth); };
return [...document.querySelectorAll("article *")].filter(e => !e.closest("svg,.visually-hidden,.sr-only") && e.getClientRects().length && right(e) > most + 1 && !scrolls(e))
  .slice(0, 3).map(e => `${e.tagName} ${e.className}: ${e.innerText.slice(0, 30).replaceAll("\\n", " ")}`);
"""
THEME = "return document.documentElement.dataset.theme"
CHOOSE = """
document.head.insertAdjacentHTML("beforeend", "<style>* { transition: none !important; }</style>");
localStorage.setItem("mode", arguments[0]); localStorage.setItem("theme", arguments[0]);
document.documentElement.dataset.mode = document.documentElement.dataset.theme = arguments[0];
"""
BROKEN = "return [...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="look at the I-th of N parts of the pages only")
    parser.add_argument("--browsers", type=int, default=2, help="browsers that work at the same time")
    args = parser.parse_args()
    address, pages = serve(args.site), every_page(args.site)
    part, parts = map(int, args.share.split("/"))
    found = [f"{page}: was not built" for page in (*PAGES, SOURCE) if page not in pages]
    pages, searches = pages[part - 1 :: parts], list(SEARCHES)[part - 1 :: parts]
    shares = [(pages[i :: args.browsers], searches[i :: args.browsers]) for i in range(args.browsers)]
    with ThreadPoolExecutor(args.browsers) as pool:
        found += itertools.chain(*pool.map(lambda share: look(address, *share, args.pictures), shares))
    print("\n".join(found) or f"{len(pages)} pages and {len(searches)} searches: nothing found")
    return bool(found)


def every_page(site: Path) -> list[str]:
    """Lists the pages that were built, without those of the theme, with one of those that show source, and with some of
    the objects'.
    """
    built = [str(path.relative_to(site))[: -len(".html")] for path in sorted(site.rglob("*.html"))]
    objects = [page for page in built if page.startswith(OBJECTS)]
    kept = {SOURCE, *PAGES, *objects[::EACH]}
    return [page for page in built if page in kept or not page.startswith((SOURCES, OBJECTS, "_static/"))]


def serve(site: Path) -> str:
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def look(address: str, pages: list[str], searches: list[str], pictures: Path | None) -> list[str]:
    """Returns the problems that one browser finds."""
    driver = chromium()
    try:
        found = [line for page in pages for line in look_at(driver, address, page, pictures)]
        return found + [line for words in searches for line in search(driver, address, words, SEARCHES[words])]
    finally:
        driver.quit()


def look_at(driver, address: str, page: str, pictures: Path | None):
    """Yields the problems of a page in every view. It is loaded once; those of PAGES are loaded for each view."""
    for number, (width, mode) in enumerate(VIEWS):
        # A window of Chromium has a least width; this sets that of the page.
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if number == 0 or page in PAGES:
            driver.get(f"{address}/{page}.html")
        if number == 0 or driver.execute_script(THEME) != mode:
            driver.execute_script(CHOOSE, mode)
            if page in PAGES:  # the theme itself has to remember the choice
                driver.get(f"{address}/{page}.html")
                assert driver.execute_script(THEME) == mode
        yield from (f"{page}, {width} pixels, {mode}: {line}" for line in wrong(driver))
        if pictures is not None and page in PAGES:
            path = pictures / f"{page.replace('/', '-')}-{width}-{mode}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(driver.get_screenshot_as_png())
    logged = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    yield from (f"{page}: console: {line}" for line in logged if not outside(line, address))


def wrong(driver):
    """Yields the problems of the current page in its current view."""
    yield from (f"wider than the screen: {line}" for line in driver.execute_script(WIDER))
    yield from (f"picture missing: {line}" for line in driver.execute_script(BROKEN))
    yield from (f"contrast {colors} {text}" for colors, text in driver.execute_script(CONTRAST).items())


def outside(line: str, address: str) -> bool:
    """Returns True if an error is about another server, such as MathJax's, which cannot be reached offline."""
    return "net::ERR_" in line and address not in line


def search(driver, address: str, words: str, page: str):
    """Yields a line if a search does not list its page among the first ones."""
    driver.get(f"{address}/search.html?q={words.replace(' ', '+')}")
    results: list[str] = []
    for _ in range(100):  # results come one after the other
        time.sleep(0.1)
        links = "return [...document.querySelectorAll('#search-results li > a')].map(a => a.getAttribute('href'))"
        results = driver.execute_script(links)
        if len(results) >= FIRST:
            break
    if not any(result.startswith(f"{page}.html") for result in results[:FIRST]):
        yield f"search for {words!r}: {page} is not among the first {FIRST}: {json.dumps(results[:FIRST])}"


if __name__ == "__main__":
    sys.exit(main())
