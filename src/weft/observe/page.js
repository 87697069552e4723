// The rest of the page: filter for options, sortable tables, and updates of live pages.
// A page is readable without the script, which only adds controls.

const EVERY = 3000; // milliseconds between two requests of a live page

const startOptions = () => {
  const [filter, all] = ["filter", "unset"].map((id) => document.getElementById(id));
  if (!filter) return;
  const choose = () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const group of document.querySelectorAll(".group")) {
      const name = group.querySelector("h3").textContent;
      for (const option of group.querySelectorAll(".option")) {
        const found = `${name}.${option.textContent}`.toLowerCase().includes(wanted);
        option.hidden = !found || (!all.checked && option.classList.contains("unset"));
      }
      group.hidden = !group.querySelector(".option:not([hidden])");
    }
  };
  filter.addEventListener("input", choose);
  all.addEventListener("input", choose);
  choose();
};

const sortings = [];

const startTables = () => {
  document.querySelectorAll("table.sortable").forEach((table, place) => {
    const sorting = (sortings[place] ??= { column: null, falling: false });
    const heads = [...table.querySelectorAll("thead th")];
    const sort = () => {
      if (sorting.column === null) return;
      const key = (row) => row.children[sorting.column].dataset.sort ?? row.children[sorting.column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [one, other] = [key(a), key(b)];
        if (one === "" || other === "") return (one === "") - (other === "");
        const [x, y] = [Number(one), Number(other)];
        const order = Number.isNaN(x) || Number.isNaN(y) ? one.localeCompare(other) : x - y;
        return sorting.falling ? -order : order;
      });
      table.tBodies[0].append(...rows);
      heads.forEach((head, index) => {
        if (index === sorting.column) head.setAttribute("aria-sort", sorting.falling ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
    };
    heads.forEach((head, index) => {
      head.querySelector("button")?.addEventListener("click", () => {
        sorting.falling = sorting.column === index && !sorting.falling;
        sorting.column = index;
        sort();
      });
    });
    sort();
  });
};

// Selection of two or more runs in the list, to be compared.
const startChoice = () => {
  const link = document.getElementById("compare");
  if (!link) return;
  const boxes = [...document.querySelectorAll("input[name=run]")];
  const show = () => {
    const names = boxes.filter((box) => box.checked).map((box) => box.value);
    const query = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
    if (names.length > 1) link.setAttribute("href", `compare?${query}`);
    else link.removeAttribute("href");
    link.textContent = names.length > 1 ? `Compare ${names.length} runs` : "Choose two runs to compare";
  };
  boxes.forEach((box) => box.addEventListener("change", show));
  show();
};

// One popover of help at a time; a click elsewhere closes it.
document.addEventListener("click", (event) => {
  for (const open of document.querySelectorAll("details.help[open]")) {
    if (!open.contains(event.target)) open.open = false;
  }
});

const start = () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll(".js").forEach((each) => (each.hidden = false));
  startCurves(data);
  startCompletions(data);
  startTimeline(data);
  startOptions();
  startTables();
  startChoice();
};

// Update a live page from its new HTML; keeps the reader's position, choices and open parts.
const renew = (text) => {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const open = [...document.querySelectorAll("details[open][data-key]")].map((each) => each.dataset.key);
  const fields = [...document.querySelectorAll("input, select")].filter((each) => each.id || each.name);
  const known = fields.map((each) => [each.id, each.name, each.value, each.checked]);
  const active = document.activeElement;
  const focus = active?.id ? [active.id, active.selectionStart, active.selectionEnd] : null;
  const scrolled = [...document.querySelectorAll(".tabs, .scroll, .graph, .log")].map((each) => [each.scrollLeft, each.scrollTop]);
  const height = window.scrollY;

  document.title = fresh.title;
  document.getElementById("data").textContent = fresh.getElementById("data").textContent;
  for (const part of ["main", "nav", "footer.end"]) {
    document.querySelector(part).replaceChildren(...fresh.querySelector(part).childNodes);
  }
  for (const each of document.querySelectorAll("details[data-key]")) each.open = open.includes(each.dataset.key);
  for (const [id, name, value, checked] of known) {
    const field = id
      ? document.getElementById(id)
      : [...document.getElementsByName(name)].find((each) => each.value === value);
    if (!field) continue;
    if (id) field.value = value;
    field.checked = checked;
  }
  start();
  if (focus) {
    const field = document.getElementById(focus[0]);
    field?.focus({ preventScroll: true });
    if (focus[1] !== undefined && focus[1] !== null) field?.setSelectionRange(focus[1], focus[2]);
  }
  document.querySelectorAll(".tabs, .scroll, .graph, .log").forEach((each, index) => {
    if (scrolled[index]) [each.scrollLeft, each.scrollTop] = scrolled[index];
  });
  window.scrollTo({ top: height, behavior: "instant" });
};

const watch = () => {
  let tag = document.body.dataset.live;
  let pressed = false;
  document.addEventListener("pointerdown", () => (pressed = true));
  document.addEventListener("pointerup", () => (pressed = false));
  const look = async () => {
    try {
      const answer = await fetch(location.href, { headers: { "If-None-Match": tag } });
      document.body.classList.remove("away");
      if (answer.status === 200) {
        const text = await answer.text();
        const reading = document.querySelector("details.help[open]") || String(getSelection()) !== "";
        if (pressed || reading) return setTimeout(look, EVERY);
        renew(text);
        tag = answer.headers.get("ETag");
      }
    } catch {
      document.body.classList.add("away");
    }
    return setTimeout(look, EVERY);
  };
  setTimeout(look, EVERY);
};

start();
if (document.body.dataset.live) watch();
