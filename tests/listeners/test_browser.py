"""The report in a real browser: it asks for nothing, and nothing is cut off on a phone or a desk."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.cli.conftest import Run
from tests.listeners.test_figures import history
from tests.needs import needs
from tests.sql.hosts import Standalone

__all__ = ["history"]

# Measures the report in a frame of each width; what it finds becomes the text of the page.
MEASURE = """<!doctype html><meta charset="utf-8"><body><script>
const widths = [320, 390, 1200], found = {};
function measured(frame, width) {
  const page = frame.contentDocument, root = page.documentElement;
  const small = [...page.querySelectorAll("th, td, caption, p, span, li, h1, h2, summary")]
    .filter(e => e.innerText && e.checkVisibility())
    .map(e => parseFloat(frame.contentWindow.getComputedStyle(e).fontSize));
  const bars = [...page.querySelectorAll("rect")].map(e => e.getBoundingClientRect());
  found[width] = {
    overflow: root.scrollWidth - root.clientWidth,
    cut: [...page.querySelectorAll("section, .tiles li")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
    smallest: Math.min(...small),
    bars: bars.filter(b => b.width > 0 && b.height > 0).length,
    rects: bars.length,
    columns: frame.contentWindow.getComputedStyle(page.querySelector(".pair")).gridTemplateColumns.split(" ").length,
  };
  if (Object.keys(found).length === widths.length) document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
}
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style.cssText = "border:0;height:900px;width:" + width + "px";
  frame.onload = () => measured(frame, width);
  frame.src = "/report.html";
  document.body.append(frame);
}
</script></body>"""


@needs("chromium")
def test_the_report_fits_a_phone_and_a_desk_and_asks_for_nothing(
    database: str, history: Standalone, podsettle: Callable[..., Run], tmp_path: Path
) -> None:
    chromium = "chromium"
    path = tmp_path / "report.html"
    assert podsettle("report", "--dsn", database, "--html", str(path)).code == 0
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = {"/": MEASURE.encode(), "/report.html": path.read_bytes()}.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                f"--user-data-dir={tmp_path / 'chromium'}",
                "--virtual-time-budget=60000",
                "--dump-dom",
                f"http://127.0.0.1:{server.server_port}/",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()
    match = re.search("FOUND(.*)END", done.stdout)
    assert match, done.stderr
    found = json.loads(match.group(1))
    assert set(found) == {"320", "390", "1200"}
    for width, page in found.items():
        assert (page["overflow"], page["cut"]) == (0, 0), width
        assert page["bars"] == page["rects"] > 3
        assert page["smallest"] >= 12
    assert [found[width]["columns"] for width in ("320", "390", "1200")] == [1, 1, 2]
    assert sorted(set(asked) - {"/favicon.ico"}) == ["/", "/report.html"]
