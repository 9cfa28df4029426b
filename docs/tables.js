/* Tables: a click on a title sorts; each cell knows its title, for narrow screens. */
(function () {
  "use strict";
  var NUMBER = /^[<>~≈]?\s*([+\-−]?[\d,]*\.?\d+)/;

  function value(row, index) {
    var text = row.cells[index] ? row.cells[index].textContent.trim() : "";
    var found = NUMBER.exec(text);
    return {
      text: text,
      number: found ? parseFloat(found[1].replace(/,/g, "").replace("−", "-")) : NaN,
    };
  }

  /* Numbers before texts, empty cells at the end. */
  function compare(a, b, sign) {
    if (!a.text || !b.text) return (a.text ? 0 : 1) - (b.text ? 0 : 1);
    var numbers = !isNaN(a.number) - !isNaN(b.number);
    if (numbers) return -numbers;
    if (!isNaN(a.number)) return sign * (a.number - b.number);
    return sign * a.text.localeCompare(b.text);
  }

  function sort(table, index) {
    var head = table.tHead.rows[0].cells[index];
    var sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (cell) {
      cell.removeAttribute("aria-sort");
    });
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    var body = table.tBodies[0];
    Array.prototype.slice
      .call(body.rows)
      .map(function (row) {
        return { row: row, key: value(row, index) };
      })
      .sort(function (a, b) {
        return compare(a.key, b.key, sign);
      })
      .forEach(function (one) {
        body.appendChild(one.row);
      });
  }

  document.querySelectorAll(".md-typeset table:not([class])").forEach(function (table) {
    if (!table.tHead || !table.tBodies.length) return;
    var columns = table.tHead.rows[0].cells.length;
    var isWide = table.scrollWidth > table.closest("article").clientWidth;
    if (columns > 3 || isWide) table.dataset.cards = "";
    if (columns > 9) table.dataset.dense = "";
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (cell, index) {
      cell.tabIndex = 0;
      cell.addEventListener("click", function () {
        sort(table, index);
      });
      cell.addEventListener("keydown", function (event) {
        if (event.key === "Enter") sort(table, index);
      });
      Array.prototype.forEach.call(table.tBodies[0].rows, function (row) {
        if (row.cells[index]) row.cells[index].dataset.title = cell.textContent;
      });
    });
  });
})();
