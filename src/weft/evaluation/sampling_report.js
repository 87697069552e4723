const articles = [...document.querySelectorAll("article")];
const search = document.querySelector("input[type=search]");
const found = document.querySelector(".found");

function show() {
  const words = search.value.toLowerCase();
  let count = 0;
  for (const article of articles) {
    const matches = article.textContent.toLowerCase().includes(words);
    article.hidden = !matches;
    count += matches;
  }
  found.textContent = `${count} of ${articles.length} prompts`;
}

search.addEventListener("input", show);
for (const box of document.querySelectorAll("input[data-column]")) {
  box.addEventListener("change", () => {
    for (const cell of document.querySelectorAll(`.cell[data-column="${box.dataset.column}"]`)) cell.hidden = !box.checked;
  });
}
show();
