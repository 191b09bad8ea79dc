"""What is pushed to the Hub says how it is loaded. The Hub is a small server on this machine that keeps commits."""

import base64
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

SUPPORT = Path(__file__).resolve().parent.parent / "support"
PUSH = """
from tiny_sana import components, stock_transformer
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

transformer = convert(stock_transformer())
transformer.push_to_hub("owner/model", token="hf_none")
pipe = MHLASanaPipeline(**components(transformer))
pipe.push_to_hub("owner/pipeline", token="hf_none")
pipe.save_pretrained("saved", push_to_hub=True, repo_id="owner/saved", token="hf_none")
"""


class Hub(BaseHTTPRequestHandler):
    """Answers what pushing asks for; the server's `commits` holds the lines of each repository's commit."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, value, **headers) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(404, {"error": "nothing here"}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.read_body()
        if self.path == "/api/repos/create":
            name = f"owner/{json.loads(body)['name']}"
            self.answer(200, {"url": f"http://127.0.0.1/{name}", "name": name, "id": "1"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer(200, {"files": [file | {"shouldIgnore": False} for file in files]})
        else:
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.server.commits[repository] = [json.loads(line) for line in body.splitlines()]
            self.answer(
                200,
                {
                    "commitUrl": f"http://127.0.0.1/{repository}/commit/a",
                    "commitOid": "a" * 40,
                    "success": True,
                },
            )

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.commits = {}
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def files_of(commit: list[dict]) -> dict[str, bytes]:
    return {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in commit
        if line["key"] == "file"
    }


def test_models_and_pipelines_are_pushed_with_a_card_that_has_the_import_line(hub, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(SUPPORT),
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-W", "ignore", "-c", PUSH]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert hub.commits.keys() == {"owner/model", "owner/pipeline", "owner/saved"}
    use = {
        "owner/model": 'transformer = mhla_diffusion.MHLASanaTransformer2DModel.from_pretrained("owner/model")',
        "owner/pipeline": 'pipe = mhla_diffusion.load_pipeline("owner/pipeline", hub=True)',
        "owner/saved": 'pipe = mhla_diffusion.load_pipeline("owner/saved", hub=True)',
    }
    for repository, commit in hub.commits.items():
        files = files_of(commit)
        card = files["README.md"].decode()
        assert card.startswith("---\n") and card.count("import mhla_diffusion\n") == 1
        assert use[repository] in card
        assert any(name.endswith(".safetensors") for name in files)
        assert ("model_index.json" in files) == (repository != "owner/model")
