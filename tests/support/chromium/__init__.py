"""A real Chromium, by the system's driver of it, which nothing is downloaded for."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.waiting import PATIENCE_S, eventually

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
SCREENSHOTS_VARIABLE = "PYTRITON_TEST_SCREENSHOTS"
"""A folder that pictures are written to, in folders of their subjects: docs, where they are shown."""

DESK, PHONE = (1280, 860), (390, 844)
_LONGEST = 2600


class Browser:
    """A window of Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Open a page."""
        self.driver.get(url)

    def resize(self, size: tuple[int, int]) -> None:
        """Make the window that of a desk or a phone."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def darken(self, *, is_dark: bool) -> None:
        """Say that the person prefers it dark, or light."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def text(self, selector: str) -> str:
        """Return what is shown there now; nothing if there is no such element."""
        from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

        try:
            return str(self.driver.find_element("css selector", selector).text)
        except (NoSuchElementException, StaleElementReferenceException):
            return ""

    def find(self, selector: str) -> Any:
        """Return an element, once it is there."""
        return eventually(lambda: next(iter(self.driver.find_elements("css selector", selector)), None))

    def wait_text(self, selector: str, condition: Callable[[str], Any]) -> str:
        """Wait until what is shown there fulfils a condition, and return it."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [self.text(selector)]
            return bool(found[0] and condition(found[0]))

        eventually(look)
        return found[0]

    def click(self, selector: str) -> None:
        """Click on an element, once that is possible."""
        from selenium.common.exceptions import WebDriverException

        def try_it() -> bool:
            try:
                self.find(selector).click()
            except WebDriverException:
                return False  # it is not drawn yet, or something still moves over it
            return True

        eventually(try_it)

    def write(self, selector: str, text: str) -> None:
        """Put a text into a field, in place of what is in it."""
        field = self.find(selector)
        field.send_keys("\ue009a\ue000")  # Ctrl+A, which the next key replaces
        field.send_keys(text)

    def requests(self) -> set[str]:
        """Return the addresses that the browser has asked for, since the last call."""
        asked = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            url = message["params"].get("request", {}).get("url") or message["params"].get("url", "")
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                asked.add(url)
        return asked

    def errors(self) -> list[str]:
        """Return what went wrong in the scripts of the page, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def width(self) -> int:
        """Return how wide the page is, what stands out included."""
        return int(self.driver.execute_script("return document.documentElement.scrollWidth"))

    def picture(self, name: str, selector: str | None = None) -> None:
        """Write a picture of the whole page, or of an element of it, where somebody asked for pictures."""
        folder = pictures_folder()
        if folder is None:
            return
        if selector is None:
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            x, y, width, height = 0, 0, size["width"], size["height"]
        else:
            look = "const r = arguments[0].getBoundingClientRect();"
            look += "return [r.x + scrollX, r.y + scrollY, r.width, r.height];"
            x, y, width, height = self.driver.execute_script(look, self.find(selector))
        clip = {"x": x, "y": y, "width": width, "height": min(height, _LONGEST), "scale": 1}
        asked = {"format": "webp", "quality": 75, "captureBeyondViewport": True, "clip": clip}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
        path = folder / f"{name}.webp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))


def pictures_folder() -> Path | None:
    """Return where pictures are to be written, where somebody asked for pictures."""
    folder = os.environ.get(SCREENSHOTS_VARIABLE)
    return Path(folder).absolute() if folder else None


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Yield a window of Chromium; skip the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    for path in (CHROMIUM, DRIVER):
        if not path.exists():
            pytest.skip(f"there is no {path}: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        # No name is looked up: a page that asked for something elsewhere would not get it.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        driver.set_page_load_timeout(PATIENCE_S)
        driver.set_script_timeout(PATIENCE_S)
        browser = Browser(driver)
        browser.resize(DESK)
        yield browser
    finally:
        driver.quit()


def hosts(urls: set[str]) -> set[str]:
    """Return host and port of addresses, of those that go to a network."""
    return {parts.netloc for parts in map(urlsplit, urls) if parts.scheme not in ("data", "blob", "about")}
