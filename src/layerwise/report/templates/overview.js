"use strict";
// A box that finds experiments. Without it the page says the same.
(() => {
const find = document.getElementById("find");
if (find) {
  find.closest(".filter").hidden = false;
  const rows = [...document.querySelectorAll("table.index tbody tr")];
  find.addEventListener("input", () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      count += !row.hidden;
    }
    for (const table of document.querySelectorAll("table.index"))
      table.closest("section").hidden = words.length > 0 && !table.querySelector("tbody tr:not([hidden])");
    document.getElementById("found").textContent = words.length ? `${count} of ${rows.length} experiments` : "";
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
})();
