"""Chat templates written for the tests, each with one peculiarity of real templates."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Marks what the assistant writes, but leaves the end token outside the marks.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ "
    "m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)

# Headers in their own tokens, content trimmed, BOS written by the template (as Llama 3's).
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + "
    "'<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)

# No generation prompt, the system text inside the first user turn, roles must alternate (as Llama
# 2's).
INST = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages[start:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and start %}{{ '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' }}{% "
    "endif %}"
    "{{ m.content.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token "
    "}}{% endif %}{% endfor %}"
)

# Role names that are several tokens long, EOS after every turn (as Zephyr's).
WORDS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# The last turn gets an empty think block, earlier ones lose theirs (as Qwen 3's).
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + "
    "'\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)

# The generation prompt opens a think block that finished turns do not show (as DeepSeek R1's).
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

# Tools are written before the last user turn, so what came before is rendered anew with every turn
# (as Mistral's).
LATE_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 == (messages | "
    "map(attribute='role') | list | length)"
    " - 1 - ((messages | map(attribute='role') | list)[::-1]).index('user') and tools %}{{ "
    "'[TOOLS]' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A header of plain words, no end token and no generation prompt.
PLAIN = "{% for m in messages %}{{ ('### Human: ' if m.role == 'user' else '### Assistant: ') + m.content + '\n' }}{% endfor %}"

# The last reply ends with another token than those before it (as gpt-oss's).
LAST_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ '<|eot_id|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else "
    "'<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The same, but no token ends the replies before it.
LAST_ENDS_IN_WORDS = LAST_ENDS.replace("'<|im_end|>' }}", "' (end of turn) ' }}")

# Contents are lists of parts, and a text is rendered as nothing (as Idefics 3's).
PARTS = (
    "{% for m in messages %}{{ m.role + ':' }}{% for part in m.content %}{% if part.type == "
    "'text' %}{{ ' ' + part.text }}"
    "{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'assistant:' }}{% endif %}"
)

# Tools stand in the system's turn, calls as JSON; words beside a call are left out, and so are
# system messages.
CALLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Adds a system message if there is none (as Qwen 2.5's).
INTRODUCED = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Hi<|im_end|>\n' }}{% "
    "endif %}" + CHATML
)

# Tools before the last user turn, calls in a form of their own, no generation prompt (as
# Mistral's).
LATE_CALLS = (
    "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% "
    "for m in messages %}"
    "{% if m.role == 'user' %}{{ '[TOOLS]' if tools and m == asked[-1] else '' }}{{ '[INST] ' + "
    "m.content + ' [/INST]' }}"
    "{% elif m.tool_calls %}{{ '<|eot_id|>' }}{% for call in m.tool_calls %}{{ call.function | "
    "tojson }}{% endfor %}"
    "{{ eos_token }}{% elif m.role == 'tool' %}{{ '[RESULT] ' + m.content + ' [/RESULT]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)

# Removes everything up to the end of the thoughts from a content, even in the last turn (as
# DeepSeek R1 distill's).
CUTS_THOUGHTS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content "
    "}}"
    "{% elif m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_end|>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|><think>\n' }}{% endif %}"
)

# Thoughts inside a content stay in the last turn alone, and those of a field of their own too (as
# Qwen 3's).
LAST_THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set content = m.content %}{% "
    "set thoughts = '' %}"
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}{% elif "
    "'</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + thoughts.strip('\n') + "
    "'\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
