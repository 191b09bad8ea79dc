"""What a model card on the Hub must say: Diffusers finds our classes only after `import mhla_diffusion`."""

from pathlib import Path

IMPORT_LINE = "import mhla_diffusion"

PIPELINE_USE = """\
{import_line}

pipe = mhla_diffusion.load_pipeline("{repo_id}", hub=True)
"""
MODEL_USE = """\
{import_line}

transformer = mhla_diffusion.{class_name}.from_pretrained("{repo_id}")
"""


def with_import_line(text: str, repo_id: str, class_name: str, *, is_pipeline: bool) -> str:
    """A model card with a section that says how to load what lies beside it.

    Args:
        text: the card as it is, metadata included; it is returned untouched if it has the import line already.
        repo_id: owner and name on the Hub.
        class_name: of the pipeline or model.
        is_pipeline: whether it is a pipeline.
    """
    if IMPORT_LINE in text:
        return text
    use = (PIPELINE_USE if is_pipeline else MODEL_USE).format(
        import_line=IMPORT_LINE, repo_id=repo_id, class_name=class_name
    )
    kind = "pipeline" if is_pipeline else "model"
    section = (
        "## Use\n\n"
        f"This {kind} is a `{class_name}`: its attention is multi-head linear attention over token blocks. "
        f"The package `mhla_diffusion` has it: import that before Diffusers loads this {kind}.\n\n"
        f"```python\n{use}```\n"
    )
    return f"{text.rstrip()}\n\n{section}" if text.strip() else section


class CardWithImportLine:
    """Comes before the Diffusers class among the bases: what is pushed to the Hub says how it is loaded."""

    _card_is_of_pipeline = False

    def _upload_folder(self, working_dir, repo_id: str, *args, **kwargs):
        # Both ways to push, `push_to_hub()` and `save_pretrained(push_to_hub=True)`, end here.
        self.amend_card(working_dir, repo_id)
        return super()._upload_folder(working_dir, repo_id, *args, **kwargs)

    def amend_card(self, folder, repo_id: str) -> None:
        """Write the import line into `folder`/README.md, which is made if it is not there."""
        card = Path(folder) / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        name = type(self).__name__
        amended = with_import_line(text, repo_id, name, is_pipeline=self._card_is_of_pipeline)
        card.write_text(amended, encoding="utf-8")
