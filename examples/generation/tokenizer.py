"""Text to tokens and back: `tokenizer.json` and the chat template of a folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from generation import config as configs
from generation.chat import Chat
from generation.detokenizer import Detokenizer

END = "<|end|>"
# of the models that this program trains, which know no turns; what talks to them has to say so somehow
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Text:
    """The tokenizer of a folder.

    Raises:
      ValueError: naming the file that is missing or damaged.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"cannot read {path}: there is no such file")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"{path} is no tokenizer: {error}") from None
        self.detokenizer = Detokenizer(self.tokenizer)
        settings = folder / "tokenizer_config.json"
        self.templates = Chat(folder, configs.read_json(settings) if settings.is_file() else {})

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens; with `special` also those that the model wants at the beginning.

        Raises:
          UnicodeEncodeError: for halves of surrogate pairs.
        """
        text.encode()
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all the tokens, which is that of a stream of them (`generation.detokenizer` says which)."""
        stream = self.detokenizer.stream()
        return "".join(map(stream.push, tokens)) + stream.end()

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """A conversation as the model was taught it, up to where its answer begins.

        Raises:
          ValueError: where the folder has no template, or the template refuses the messages.
        """
        return self.encode(self.templates.render(messages), special=False)


def train(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
