// Curves: redrawn when the reader zooms, selects another axis or smooths them. The page's HTML holds the first view.

const SMOOTHED_FROM = 20; // points; shorter lines are not smoothed
const SVG = "http://www.w3.org/2000/svg";
// The reader's choices, kept when the page updates itself.
const view = { weight: 0.6, across: "step", log: false, range: null };

// Four significant digits, as in weft.observe.metrics.number.
const number = (value) => {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  const digits = Math.max(0, 3 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { maximumFractionDigits: digits });
};

const duration = (seconds) => {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const pad = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60)];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours}:${pad(minutes % 60)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
};

const short = (value) => {
  for (const [size, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${sign}`;
  }
  return number(value);
};

const told = { step: number, tokens: short, time: duration };

// Return the exponential moving average, corrected for the bias towards its initial value 0.
const smooth = (values) => {
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    mean = view.weight * mean + (1 - view.weight) * value;
    mass = view.weight * mass + (1 - view.weight);
    return mean / mass;
  });
};

// Return the index of the first of `xs` that is at least x.
const from = (xs, x) => {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
};

const nearest = (xs, x) => {
  const next = Math.min(from(xs, x), xs.length - 1);
  return next > 0 && x - xs[next - 1] <= xs[next] - x ? next - 1 : next;
};

// Convert steps to tokens or seconds, interpolating between the steps whose values are in the page.
const along = (axis, steps) => {
  if (view.across === "step") return steps;
  return steps.map((step) => {
    const next = Math.min(from(axis.step, step), axis.step.length - 1);
    const values = axis[view.across];
    if (axis.step[next] === step || next === 0) return values[next];
    const share = (step - axis.step[next - 1]) / (axis.step[next] - axis.step[next - 1]);
    return values[next - 1] + share * (values[next] - values[next - 1]);
  });
};

// Round numbers within a range, as in weft.observe.charts.ticks.
const ticks = (low, high, most) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  for (const factor of [1, 2, 2.5, 5, 10, 20]) {
    const step = power * factor;
    const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
    if (last - first >= most && factor < 20) continue;
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }
  return [];
};

const powers = (low, high) => {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    for (const factor of high - low > 2.5 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  }
  return found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high).slice(0, 8);
};

const timeTicks = (low, high, most) => {
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((each) => (high - low) / each <= most);
  if (!step || high - low < 4) return ticks(low, high, most);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
};

const element = (tag, className, text = "") => {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
};

// Return a chart's lines as drawn, the part of them in view, and its axis ranges.
const prepare = (one, axes) => {
  const { chart } = one;
  one.lines = chart.lines.map((line) => {
    const xs = along(axes[line.run], line.x);
    const smoothed = view.weight > 0 && !chart.exact && line.y.length >= SMOOTHED_FROM;
    return { xs, ys: line.y, shown: smoothed ? smooth(line.y) : line.y, smoothed };
  });
  const ends = one.lines.flatMap(({ xs }) => [xs[0], xs[xs.length - 1]]);
  let [x0, x1] = view.range ?? [Math.min(...ends), Math.max(...ends)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  let [low, high] = [Infinity, -Infinity];
  for (const line of one.lines) {
    line.first = Math.max(0, from(line.xs, x0) - 1);
    line.last = Math.min(line.xs.length, from(line.xs, x1) + 1);
    for (let i = line.first; i < line.last; i += 1) {
      low = Math.min(low, line.ys[i]);
      high = Math.max(high, line.ys[i]);
    }
  }
  if (low > high) [low, high] = [0, 1];
  one.log = view.log && low > 0;
  if (one.log) [low, high] = [Math.log10(low), Math.log10(high)];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  one.frame = { x0, x1, y0: low - pad, y1: high + pad };
};

const place = ({ frame, log }, x, y) => [
  (100 * (x - frame.x0)) / (frame.x1 - frame.x0),
  100 - (100 * ((log ? Math.log10(y) : y) - frame.y0)) / (frame.y1 - frame.y0),
];

const path = (one, line, values, className, hue) => {
  const made = document.createElementNS(SVG, "path");
  const points = [];
  for (let i = line.first; i < line.last; i += 1) {
    points.push(place(one, line.xs[i], values[i]).map((n) => n.toFixed(2)).join(" "));
  }
  made.setAttribute("d", points.length ? "M" + points.join("L") : "");
  made.setAttribute("class", className);
  made.setAttribute("style", hue);
  return made;
};

const drawCurve = (one, axes) => {
  prepare(one, axes);
  const { plot, frame, log, hues } = one;
  const svg = plot.querySelector("svg");
  const large = one.figure.classList.contains("large");
  svg.replaceChildren();
  plot.querySelectorAll(".tick, .dot").forEach((mark) => mark.remove());
  const rows = log
    ? powers(frame.y0, frame.y1).map((value) => [value, Math.log10(value)])
    : ticks(frame.y0, frame.y1, large ? 6 : 4).map((value) => [value, value]);
  for (const [value, y] of rows) {
    const top = 100 - (100 * (y - frame.y0)) / (frame.y1 - frame.y0);
    const grid = document.createElementNS(SVG, "path");
    grid.setAttribute("class", "grid");
    grid.setAttribute("d", `M0 ${top.toFixed(2)}H100`);
    svg.append(grid);
    const tick = element("span", "tick y", number(value));
    tick.style.top = `${top}%`;
    plot.append(tick);
  }
  const most = large && plot.clientWidth > 500 ? 7 : 4;
  const columns = view.across === "time" ? timeTicks(frame.x0, frame.x1, most) : ticks(frame.x0, frame.x1, most);
  const whole = columns.filter((x) => view.across !== "step" || Number.isInteger(x));
  whole.forEach((x, index) => {
    const left = (100 * (x - frame.x0)) / (frame.x1 - frame.x0);
    const words = { step: "step ", tokens: "", time: "" }[view.across];
    const unit = index === whole.length - 1 && view.across === "tokens" ? " tokens" : "";
    const edge = left < 4 ? " first" : left > 92 ? " last" : "";
    const tick = element("span", `tick x${edge}`, `${index ? "" : words}${told[view.across](x)}${unit}`);
    tick.style.left = `${left}%`;
    plot.append(tick);
  });
  one.lines.forEach((line, index) => {
    svg.append(path(one, line, line.ys, line.smoothed ? "raw dim" : "raw", hues[index]));
    if (line.smoothed) svg.append(path(one, line, line.shown, "smooth", hues[index]));
    if (line.last - line.first > 12) return;
    for (let i = line.first; i < line.last; i += 1) dot(one, line, i, "dot small", hues[index]);
  });
};

const dot = (one, line, i, className, hue) => {
  const [left, top] = place(one, line.xs[i], line.ys[i]);
  if (left < -0.01 || left > 100.01) return;
  const mark = element("i", className);
  mark.setAttribute("style", hue);
  mark.style.left = `${left}%`;
  mark.style.top = `${top}%`;
  one.plot.append(mark);
};

const startCurves = ({ axes, charts = [] }) => {
  const all = [...document.querySelectorAll("[data-chart]")].map((figure) => ({
    figure,
    plot: figure.querySelector(".plot"),
    readout: figure.querySelector(".readout"),
    chart: charts[Number(figure.dataset.chart)],
  }));
  for (const one of all) {
    one.hues = one.chart.lines.map((_, index) => one.plot.querySelector(`.raw[data-line="${index}"]`).getAttribute("style"));
  }
  const reset = document.getElementById("reset");
  const draw = () => {
    all.forEach((one) => drawCurve(one, axes));
    if (reset) reset.hidden = view.range === null;
  };

  // All charts show the same position, so that curves can be compared.
  const pointAt = (x) => {
    for (const one of all) {
      const { figure, plot, readout } = one;
      plot.querySelectorAll(".cursor, .dot.now").forEach((mark) => mark.remove());
      const entries = [...figure.querySelectorAll(".legend b")];
      for (const word of [readout, ...entries]) {
        word.dataset.last ??= word.textContent;
        if (x === null) word.textContent = word.dataset.last;
      }
      if (x === null) continue;
      const first = one.lines[0];
      const at = nearest(first.xs, x);
      const cursor = element("i", "cursor");
      cursor.style.left = `${place(one, first.xs[at], 1)[0]}%`;
      plot.append(cursor);
      one.lines.forEach((line, index) => {
        const i = nearest(line.xs, x);
        dot(one, line, i, "dot now", one.hues[index]);
        if (entries[index]) entries[index].textContent = number(line.ys[i]);
      });
      const where = element("span", "", `step ${number(one.chart.lines[0].x[at])}  `);
      readout.replaceChildren(where, "step" in readout.dataset ? "" : number(first.ys[at]));
    }
  };

  const zoom = (range) => {
    view.range = range;
    draw();
  };
  for (const one of all) listen(one, pointAt, zoom);
  reset?.addEventListener("click", () => zoom(null));

  const bind = (id, key, read) => {
    const control = document.getElementById(id);
    if (!control) return;
    const write = () => {
      if (control.type === "checkbox") control.checked = view[key];
      else control.value = String(view[key]);
      const output = control.parentElement.querySelector("output");
      if (output) output.textContent = view[key].toFixed(2);
    };
    write();
    control.addEventListener("input", () => {
      view[key] = read(control);
      if (key === "across") view.range = null;
      write();
      draw();
    });
  };
  bind("smoothing", "weight", (control) => Number(control.value));
  bind("x", "across", (control) => control.value);
  bind("log-scale", "log", (control) => control.checked);
  draw();
};

// The pointer shows values of a curve and selects a part of it while its button is down; arrow keys move along the curve.
const listen = (one, pointAt, zoom) => {
  const { plot } = one;
  const at = (event) => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    return one.frame.x0 + (one.frame.x1 - one.frame.x0) * share;
  };
  let begun = null;
  let band = null;
  let index = null;
  const end = () => {
    band?.remove();
    begun = band = null;
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button !== 0) return;
    event.preventDefault();
    plot.focus({ preventScroll: true });
    plot.setPointerCapture(event.pointerId);
    begun = { x: at(event), left: event.clientX };
  });
  plot.addEventListener("pointermove", (event) => {
    pointAt(at(event));
    if (!begun || Math.abs(event.clientX - begun.left) < 5) return;
    if (!band) plot.append((band = element("i", "band")));
    const share = (x) => (100 * (x - one.frame.x0)) / (one.frame.x1 - one.frame.x0);
    const [low, high] = [begun.x, at(event)].sort((a, b) => a - b);
    band.style.left = `${share(low)}%`;
    band.style.width = `${share(high) - share(low)}%`;
  });
  plot.addEventListener("pointerup", (event) => {
    const chosen = band && [begun.x, at(event)].sort((a, b) => a - b);
    end();
    if (chosen && chosen[1] > chosen[0]) zoom(chosen);
  });
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("dblclick", () => zoom(null));
  plot.addEventListener("pointerleave", () => begun || pointAt(null));
  plot.addEventListener("blur", () => pointAt((index = null)));
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom(null);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const { xs } = one.lines[0];
    const last = xs.length - 1;
    index = index === null ? (move > 0 ? 0 : last) : Math.min(last, Math.max(0, index + move));
    pointAt(xs[index]);
  });
};
