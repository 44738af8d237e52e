"use strict";
/* Unpacks the drawing library, plotly.js, which the page carries compressed. The page's policy knows its hash. */
const Library = (async () => {
  const text = atob(document.getElementById("plotly").textContent);
  const packed = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
})();
