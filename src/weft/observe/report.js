// The curves answer to a pointer and to a smoothing slider; steps of completions and options can be chosen. The page reads
// without this script as well: it only adds to what is there.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("[data-chart]")].map((figure) => ({
    figure,
    plot: figure.querySelector(".plot"),
    readout: figure.querySelector(".readout"),
    chart: charts[Number(figure.dataset.chart)],
  }));
  const SMOOTHED_FROM = 20; // points; a line of fewer is shown as it is
  const SVG = "http://www.w3.org/2000/svg";
  let weight = 0.6;

  // Four significant digits, as in weft.observe.metrics.number.
  const number = (value) => {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 10000) return Math.round(value).toLocaleString("en");
    if (size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    const digits = Math.max(0, 3 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en", { maximumFractionDigits: digits });
  };

  // An exponential mean that does not lean on where the line began.
  const smooth = (values) => {
    let mean = 0;
    let mass = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return mean / mass;
    });
  };

  const at = ({ x: [x0, x1], y: [y0, y1] }, x, y) => [(100 * (x - x0)) / (x1 - x0), 100 - (100 * (y - y0)) / (y1 - y0)];

  const draw = ({ plot, chart }) => {
    plot.querySelectorAll(".smooth").forEach((path) => path.remove());
    chart.lines.forEach((line, index) => {
      const raw = plot.querySelector(`.raw[data-line="${index}"]`);
      line.shown = weight > 0 && !chart.exact && line.x.length >= SMOOTHED_FROM ? smooth(line.y) : line.y;
      raw.classList.toggle("dim", line.shown !== line.y);
      if (line.shown === line.y) return;
      const path = document.createElementNS(SVG, "path");
      const points = line.x.map((x, i) => at(chart, x, line.shown[i]).map((n) => n.toFixed(2)).join(" "));
      path.setAttribute("d", "M" + points.join("L"));
      path.setAttribute("class", "smooth");
      path.setAttribute("style", raw.getAttribute("style"));
      raw.after(path);
    });
  };

  const nearest = (xs, x) => {
    let low = 0;
    let high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  };

  // Every chart shows the same step, so that curves can be read against each other.
  const pointAt = (step) => {
    for (const { figure, plot, readout, chart } of figures) {
      plot.querySelectorAll(".cursor, .dot.now").forEach((mark) => mark.remove());
      const entries = [...figure.querySelectorAll(".legend b")];
      for (const told of [readout, ...entries]) {
        told.dataset.last ??= told.textContent;
        if (step === null) told.textContent = told.dataset.last;
      }
      if (step === null) continue;
      const first = chart.lines[0];
      const place = nearest(first.x, step);
      const cursor = document.createElement("i");
      cursor.className = "cursor";
      cursor.style.left = `${at(chart, first.x[place], 0)[0]}%`;
      plot.append(cursor);
      chart.lines.forEach((line, index) => {
        const i = nearest(line.x, step);
        const [left, top] = at(chart, line.x[i], line.y[i]);
        const dot = document.createElement("i");
        dot.className = "dot now";
        dot.setAttribute("style", plot.querySelector(`.raw[data-line="${index}"]`).getAttribute("style"));
        dot.style.left = `${left}%`;
        dot.style.top = `${top}%`;
        plot.append(dot);
        if (entries[index]) entries[index].textContent = number(line.y[i]);
      });
      const where = document.createElement("span");
      where.textContent = `step ${number(first.x[place])}  `;
      readout.replaceChildren(where, number(first.y[place]));
    }
  };

  for (const { plot, chart } of figures) {
    const [x0, x1] = chart.x;
    let step = null;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      pointAt(x0 + ((x1 - x0) * (event.clientX - box.left)) / box.width);
    });
    plot.addEventListener("pointerleave", () => pointAt(null));
    plot.addEventListener("blur", () => pointAt((step = null)));
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const xs = chart.lines[0].x;
      const last = xs.length - 1;
      step = step === null ? (move > 0 ? 0 : last) : Math.min(last, Math.max(0, step + move));
      pointAt(xs[step]);
    });
  }

  const slider = document.querySelector(".smoothing input");
  slider?.addEventListener("input", () => {
    weight = Number(slider.value);
    slider.nextElementSibling.textContent = weight.toFixed(2);
    figures.forEach(draw);
  });
  figures.forEach(draw);

  for (const tabs of document.querySelectorAll(".tabs")) {
    const buttons = [...tabs.children];
    const choose = (step) => {
      for (const button of buttons) {
        const chosen = button.dataset.step === step;
        button.setAttribute("aria-pressed", String(chosen));
        if (chosen) tabs.scrollLeft = button.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - button.offsetWidth) / 2;
      }
      document.querySelectorAll(".panel").forEach((panel) => (panel.hidden = panel.dataset.step !== step));
    };
    buttons.forEach((button) => button.addEventListener("click", () => choose(button.dataset.step)));
    tabs.classList.add("live");
    choose(buttons[buttons.length - 1].dataset.step);
  }

  const filter = document.querySelector(".filter");
  const all = document.querySelector(".all");
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
  if (filter) {
    filter.addEventListener("input", choose);
    all.addEventListener("input", choose);
    choose();
  }
  document.querySelectorAll(".js").forEach((element) => (element.hidden = false));
})();
