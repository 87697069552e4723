// Samples: one step at a time, searchable, with tokens coloured by their log-prob or advantage.

const chosen = { step: null, words: "", colour: "" };

// Strength and name of a token's colour: unlikely tokens are warm, positive advantages green and negative ones red.
const tint = (key, value, largest) => {
  if (key === "logprobs") return ["--bad", Math.min(1, -value / 6)];
  return [value >= 0 ? "--good" : "--bad", largest ? Math.abs(value) / largest : 0];
};

const say = (tokens, i) => {
  const parts = [];
  if (tokens.logprobs) parts.push(`log-prob ${number(tokens.logprobs[i])}, probability ${number(Math.exp(tokens.logprobs[i]))}`);
  if (tokens.advantages) parts.push(`advantage ${number(tokens.advantages[i])}`);
  if (tokens.trained && !tokens.trained[i]) parts.push("not trained on");
  return parts.join("; ");
};

const paint = (box, tokens) => {
  box.dataset.plain ??= box.textContent;
  const values = tokens[chosen.colour];
  if (!values && !tokens.trained) {
    if (box.dataset.painted) box.textContent = box.dataset.plain;
    delete box.dataset.painted;
    return;
  }
  const largest = values ? Math.max(...values.map(Math.abs)) : 0;
  const spans = tokens.t.map((text, i) => {
    const span = element("span", tokens.trained && !tokens.trained[i] ? "tok untrained" : "tok", text);
    if (values && !(tokens.trained && !tokens.trained[i])) {
      const [colour, strength] = tint(chosen.colour, values[i], largest);
      span.setAttribute("style", `--tint:var(${colour});--strength:${Math.round(strength * 55)}%`);
    }
    span.title = say(tokens, i);
    return span;
  });
  const whole = tokens.t.join("");
  if (box.dataset.plain.length > whole.length + 20) spans.push(element("span", "quiet", " … the rest has no values"));
  box.replaceChildren(...spans);
  box.dataset.painted = "true";
};

const startCompletions = ({ tokens = [] }) => {
  const panels = [...document.querySelectorAll(".panel")];
  if (!panels.length) return;
  const tabs = document.querySelector(".tabs");
  const buttons = tabs ? [...tabs.children] : [];
  const [search, colour, found] = ["search", "colour", "found"].map((id) => document.getElementById(id));

  const show = () => {
    const words = chosen.words.trim().toLowerCase();
    let groups = 0;
    if (tabs) tabs.hidden = words !== "";
    for (const panel of panels) {
      let any = false;
      for (const group of panel.querySelectorAll(".group-of")) {
        group.hidden = words !== "" && !group.textContent.toLowerCase().includes(words);
        any ||= !group.hidden;
        if (words !== "" && !group.hidden) groups += 1;
      }
      panel.hidden = words === "" ? tabs && panel.dataset.step !== chosen.step : !any;
      panel.classList.toggle("found", words !== "");
      if (panel.hidden) continue;
      for (const box of panel.querySelectorAll("[data-tokens]")) paint(box, tokens[Number(box.dataset.tokens)]);
    }
    if (found) found.textContent = words === "" ? "" : `${groups} ${groups === 1 ? "prompt" : "prompts"} found`;
  };
  const choose = (step) => {
    chosen.step = step;
    for (const button of buttons) {
      const pressed = button.dataset.step === step;
      button.setAttribute("aria-pressed", String(pressed));
      if (pressed) tabs.scrollLeft = button.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - button.offsetWidth) / 2;
    }
    show();
  };
  buttons.forEach((button) => button.addEventListener("click", () => choose(button.dataset.step)));
  search?.addEventListener("input", () => {
    chosen.words = search.value;
    show();
  });
  colour?.addEventListener("input", () => {
    chosen.colour = colour.value;
    show();
  });
  if (search) search.value = chosen.words;
  if (colour) colour.value = chosen.colour;
  if (!tabs) return show();
  tabs.classList.add("live");
  const known = buttons.some((button) => button.dataset.step === chosen.step);
  choose(known ? chosen.step : buttons[buttons.length - 1].dataset.step);
};
