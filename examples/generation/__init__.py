"""Text from a decoder on one machine: the parts of `examples/generate.py`, each with one thing to know.

| part | knows | does not know |
|---|---|---|
| `config`, `model`, `weights`, `tokenizer` | folders in Hugging Face's format, the decoder in them | caches, batches |
| `training` | how a small model is made where no folder is given | how it is served |
| `sampling` | which token is taken, from logits and a seed | where logits come from |
| `scheduler` | which tokens of which requests go into the next step; pages | arrays of JAX, text |
| `runner` | a step: one compiled program per bucket, over paged caches | requests |
| `speculative` | what a small model thinks will come | whether it is right |
| `engine` | requests from beginning to end: scheduler, runner and draft together | text |
| `text` | text out of tokens, stop strings | models |
| `service`, `server` | a thread that steps, and the OpenAI interface over it | how a step is computed |
| `dense` | one request at a time through a padded cache: what all of this is compared with | pages |

The first four serve programs that train as well.
"""
