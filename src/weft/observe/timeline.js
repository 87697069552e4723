// Timeline of the step that the reader selects.

const shownStep = { at: null };

const startTimeline = ({ timeline }) => {
  const slider = document.getElementById("step");
  if (!slider || !timeline?.steps.length) return;
  const gantt = document.getElementById("gantt");
  const which = document.getElementById("which");
  const last = timeline.steps.length - 1;
  const ends = timeline.steps.map(({ spans }) => Math.max(...spans.map(([, , start, seconds]) => start + seconds)));

  const show = (at) => {
    shownStep.at = at === last ? null : timeline.steps[at].step;
    slider.value = String(at);
    const { step, spans } = timeline.steps[at];
    const length = Math.max(ends[at], 1e-6);
    which.textContent = `Step ${step}, ${duration(length)}.`;
    slider.setAttribute("aria-valuetext", which.textContent);
    const tracks = new Map();
    timeline.lanes.forEach((lane, index) => {
      if (!spans.some((span) => span[1] === index)) return;
      const row = element("div", "lane");
      const track = element("div", "track");
      row.append(element("span", "lane-name", lane), track);
      tracks.set(index, { row, track });
    });
    for (const [name, lane, start, seconds] of spans) {
      const bar = element("i", "");
      const width = (100 * seconds) / length;
      bar.setAttribute("style", `left:${(100 * start) / length}%;width:${width}%;${timeline.styles[name]}`);
      bar.title = `${timeline.names[name]}, ${duration(seconds)}, begins at ${number(start)} s`;
      if (width > 4 + 1.5 * timeline.names[name].length) bar.append(element("b", "", timeline.names[name]));
      tracks.get(lane).track.append(bar);
    }
    const axis = element("div", "axis");
    for (const at of ticks(0, length, 5)) {
      const mark = element("span", "", `${number(at)} s`);
      mark.style.left = `${(100 * at) / length}%`;
      axis.append(mark);
    }
    gantt.replaceChildren(...[...tracks.values()].map(({ row }) => row), axis);
    gantt.setAttribute("aria-label", `Timeline of step ${step}, ${duration(length)}`);
  };
  const on = (id, target) => document.getElementById(id)?.addEventListener("click", () => show(target()));
  slider.addEventListener("input", () => show(Number(slider.value)));
  on("step-back", () => Math.max(0, Number(slider.value) - 1));
  on("step-on", () => Math.min(last, Number(slider.value) + 1));
  on("step-longest", () => ends.indexOf(Math.max(...ends)));
  const known = timeline.steps.findIndex(({ step }) => step === shownStep.at);
  if (known >= 0) show(known);
};
