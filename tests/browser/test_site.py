"""The built site in a real browser: light, dark, a phone's width, without JavaScript."""

import functools
import http.server
import shutil
import threading

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import ROOT
from playwright.sync_api import sync_playwright

LESSONS = sorted(
    path.relative_to(ROOT / "notebooks").with_suffix("").as_posix()
    for path in (ROOT / "notebooks").glob("*/*.py")
)
PAGES = ["", "units/distributed/", "glossary/", "contributing/"]
PAGES += [f"lessons/{name}/" for name in ("features", "claims", "recovery", "runs", *LESSONS)]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(_Quiet, directory=str(ROOT / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page_path", PAGES)
def test_page(page_path, scheme, browser, address):
    page = browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 800})
    hosts, messages = set(), []
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(address + page_path, wait_until="networkidle")
    page.wait_for_selector(".md-search[aria-label]", state="attached")  # our script has run
    assert hosts == {address.split("/")[2]}, "a request left the site"
    assert messages == []
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360, "the page scrolls sideways"
    found = Axe().run(page).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert not serious, [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in serious]
    page.close()


def test_quiz_works_without_javascript(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}lessons/{LESSONS[0]}/")
    option = page.locator(".quiz-option").first
    feedback = option.locator(".quiz-feedback")
    assert not feedback.is_visible()
    option.locator("label").click()
    assert feedback.is_visible()
    context.close()


def test_search_finds_a_symbol(browser, address):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(address)
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("_reconfigure", delay=20)
    page.wait_for_selector(".md-search-result__link", state="attached", timeout=20_000)
    page.close()
