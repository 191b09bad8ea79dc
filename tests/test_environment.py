import importlib.metadata
import json
import sys

from mhla_diffusion.environment import as_text, describe_environment


def test_the_facts_are_json_and_name_versions_backend_and_places(monkeypatch, tmp_path):
    monkeypatch.setenv("MHLA_WEIGHTS", str(tmp_path))
    facts = describe_environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["attention"]
    text = as_text(facts)
    assert facts["attention"] in text
    assert str(tmp_path / facts["default_pipeline"]) in text
