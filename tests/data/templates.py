"""Chat templates written for the tests, each with one habit that real ones have."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Marks what the assistant writes, but leaves the end token outside the marks.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Headers in their own tokens, content trimmed, BOS written by the template (as Llama 3's).
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# No generation prompt, the system text inside the first user turn, roles must alternate (as Llama 2's).
INST = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages[start:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and start %}{{ '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# Roles in words that are several tokens long, EOS after every turn (as Zephyr's).
WORDS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# The last turn gets an empty think block, earlier ones lose theirs (as Qwen 3's).
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The generation prompt opens a think block that finished turns do not show (as DeepSeek R1's).
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

# Tools are written before the last user turn, so what came before is rendered anew with every turn (as Mistral's).
LATE_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 == (messages | map(attribute='role') | list | length)"
    " - 1 - ((messages | map(attribute='role') | list)[::-1]).index('user') and tools %}{{ '[TOOLS]' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A header in plain words, no end token and no generation prompt.
PLAIN = "{% for m in messages %}{{ ('### Human: ' if m.role == 'user' else '### Assistant: ') + m.content + '\n' }}{% endfor %}"
