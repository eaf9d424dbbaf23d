// Runs the trace processor of Perfetto's user interface in Node, with what a worker of a browser has:
//   node perfetto.js DIRECTORY < messages > the answers, a length (4 bytes) before each
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const read = (name) => fs.readFileSync(path.join(process.argv[2], path.basename(name)));

class XMLHttpRequest {
  open(_method, url) {
    this.url = url;
  }
  send() {
    this.status = 200;
    this.response = new Uint8Array(read(this.url)).buffer;
  }
}

// The interface asks with a module of its own whether memory has 64-bit addresses (section 5 comes
// first in it). Node 20 says yes, and cannot do it.
class Module extends WebAssembly.Module {
  constructor(bytes) {
    if (bytes[8] === 5) throw new Error("no");
    super(bytes);
  }
}

const scope = {
  ...{ TypeError, RangeError, Error, Uint8Array, ArrayBuffer, URL, TextDecoder, TextEncoder },
  ...{ performance, setTimeout, queueMicrotask, crypto, XMLHttpRequest, WorkerGlobalScope: Object },
  WebAssembly: Object.create(WebAssembly, { Module: { value: Module } }),
  console: { log() {}, warn() {}, error() {} },
  location: { href: "http://localhost/engine_bundle.js" },
  navigator: {},
  importScripts() {},
};
scope.self = scope;
vm.createContext(scope);
try {
  vm.runInContext(String(read("engine_bundle.js")), scope);
} catch (error) {
  console.error(String(error.stack).slice(-500)); // what comes before is the whole script
  process.exit(1);
}
setTimeout(() => {
  const port = {
    postMessage(bytes) {
      const size = Buffer.alloc(4);
      size.writeUInt32LE(bytes.length);
      fs.writeSync(1, size);
      fs.writeSync(1, bytes);
    },
  };
  scope.onmessage({ data: port });
  port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) });
});
