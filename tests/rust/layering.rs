//! Folders are layers: nothing imports from a later one, and `unsafe` stays where it belongs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The layers, lowest first, as `lib.rs` documents them.
const LAYERS: [&str; 10] =
    ["base", "index", "cache", "engines", "memory", "kernels", "tensor", "transfer", "pool", "python"];

/// The places where `unsafe` is allowed: folders and files below `src`.
const UNSAFE: [&str; 11] = [
    "base/prefetch.rs",
    "memory",
    "kernels",
    "tensor/dlpack.rs",
    "python/args.rs",
    "python/capsule.rs",
    "python/export.rs",
    "python/framework.rs",
    "python/gil.rs",
    "python/torch_allocator.rs",
    "python/tokens.rs",
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The lines of a file without comments.
fn code(path: &Path) -> Vec<String> {
    without_comments(&fs::read_to_string(path).expect("a source file")).lines().map(str::to_owned).collect()
}

/// Rust without its comments that begin with `//`: no other kind is used. What is in a string is none.
fn without_comments(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let whole = match first {
            '/' if rest.starts_with("//") => {
                rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
                continue;
            }
            'r' if rest.starts_with("r\"") => 2 + rest[2..].find('"').map_or(rest.len() - 2, |at| at + 1),
            'r' if rest.starts_with("r#\"") => 3 + rest[3..].find("\"#").map_or(rest.len() - 3, |at| at + 2),
            '"' => quoted(rest),
            // A quotation mark as a character; any other `'` may begin a lifetime.
            '\'' if rest.starts_with("'\"'") => 3,
            '\'' if rest.starts_with("'\\") => 4.min(rest.len()),
            _ => first.len_utf8(),
        };
        let (next, after) = rest.split_at(whole);
        code.push_str(next);
        rest = after;
    }
    code
}

/// The length of the string literal that `text` begins with.
fn quoted(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text[1..].bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |at| at + 2)
}

/// The layers that `lines` imports as `crate::layer`, including those within `use crate::{...}`.
fn imports(lines: &[String]) -> Vec<String> {
    let text = lines.join("\n");
    let mut found = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let mut depth = 0;
        let mut word = String::new();
        // Names directly in the group (or, without one, the first name) are layers.
        for letter in text[at + "crate::".len()..].chars() {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ if letter.is_alphanumeric() || letter == '_' => {
                    word.push(letter);
                    continue;
                }
                _ => (),
            }
            if !word.is_empty() {
                found.push(std::mem::take(&mut word));
            }
            if depth <= 0 {
                break;
            }
        }
    }
    found
}

fn rank(layer: &str) -> Option<usize> {
    LAYERS.iter().position(|known| *known == layer)
}

/// The forbidden imports of one file.
fn upward(layer: &str, lines: &[String]) -> Vec<String> {
    let own = rank(layer).expect("a known layer");
    imports(lines).into_iter().filter(|name| rank(name).is_some_and(|other| other > own)).collect()
}

#[test]
fn no_layer_imports_from_a_later_one() {
    for layer in LAYERS {
        for path in sources(&src().join(layer)) {
            let found = upward(layer, &code(&path));
            assert!(found.is_empty(), "{} imports from {found:?}", path.display());
        }
    }
}

#[test]
fn no_source_climbs_out_of_its_layer() {
    for path in sources(&src()) {
        assert!(!code(&path).iter().any(|line| line.contains("super::super")), "{}", path.display());
    }
}

#[test]
fn every_source_belongs_to_a_layer() {
    for path in sources(&src()) {
        let relative = path.strip_prefix(src()).expect("below src").to_owned();
        let first = relative.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
        assert!(first == "lib.rs" || rank(&first).is_some(), "{first} is no layer");
    }
}

#[test]
fn unsafe_stays_in_its_places() {
    for path in sources(&src()) {
        let relative = path.strip_prefix(src()).expect("below src").to_string_lossy().replace('\\', "/");
        let allowed =
            UNSAFE.iter().any(|place| relative == *place || relative.starts_with(&format!("{place}/")));
        let uses = code(&path)
            .iter()
            .any(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe"));
        assert!(allowed || !uses, "{relative} must do without unsafe");
    }
}

/// The name of the type or trait that `line` declares for others, if it does.
fn declared(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let (kind, rest) = rest.split_once(' ')?;
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    ["struct", "enum", "trait", "type"].contains(&kind).then_some(name)
}

#[test]
fn no_two_types_have_one_name() {
    let mut seen = HashMap::new();
    for path in sources(&src()) {
        if path.starts_with(src().join("python")) {
            continue; // classes, which have the names of what they wrap
        }
        for line in code(&path) {
            if let Some(name) = declared(&line)
                && let Some(other) = seen.insert(name.to_owned(), path.clone())
            {
                panic!("{name} is a type of {} and of {}", other.display(), path.display());
            }
        }
    }
    assert!(seen.len() > 200, "{}", seen.len());
}

#[test]
fn only_memory_calls_the_driver() {
    for path in sources(&src()) {
        let relative = path.strip_prefix(src()).expect("below src").to_string_lossy().into_owned();
        let uses = code(&path).iter().any(|line| line.contains("cudarc::"));
        assert!(relative.starts_with("memory") || !uses, "{relative} calls cudarc");
    }
}

/// The Python modules of this package that `line` names in a string, except the modules of classes: `kvpool`
/// itself and the extension.
fn python_modules(line: &str) -> Vec<&str> {
    let strings = line.split('"').skip(1).step_by(2);
    let is_module = |text: &&str| {
        text.strip_prefix("kvpool.")
            .is_some_and(|rest| rest.chars().all(|c| c.is_lowercase() || "._".contains(c)))
    };
    strings.filter(is_module).filter(|module| *module != "kvpool._kvpool").collect()
}

#[test]
fn rust_names_no_python_module_but_errors() {
    for path in sources(&src()) {
        for line in code(&path) {
            for module in python_modules(&line) {
                let is_errors = module == "kvpool.errors" && path.ends_with("python/errors.rs");
                assert!(is_errors, "{} names {module}", path.display());
            }
        }
    }
}

#[test]
fn the_checks_find_violations() {
    let lines = ["use crate::{base::{Id, Row}, pool::KvPool};".to_owned(), "crate::python::x();".to_owned()];
    assert_eq!(upward("index", &lines), ["pool", "python"]);
    assert!(upward("python", &lines).is_empty());
    assert_eq!(declared("    pub struct Pool<T> {"), Some("Pool"));
    assert_eq!(declared("pub(super) struct Pool;"), None);
    let line = r#"py.import("kvpool.observe.leaks")?.call("kvpool.Tensor()", "kvpool._kvpool", "sys");"#;
    assert_eq!(python_modules(line), ["kvpool.observe.leaks"]);
    let text = "a(\"// \\\" //\", '\"', '\\'', r#\"//\"\"#, r\"//\\\"); // not this\n/// nor this\nb(&'a c) // nor this";
    assert_eq!(
        without_comments(text),
        "a(\"// \\\" //\", '\"', '\\'', r#\"//\"\"#, r\"//\\\"); \n\nb(&'a c) "
    );
}

/// The modules of a layer, and those of the layer that each imports.
fn modules(layer: &str) -> HashMap<String, HashSet<String>> {
    let root = code(&src().join(layer).join("mod.rs")).join("\n");
    let mut exports = HashMap::new();
    let mut graph = HashMap::new();
    for part in root.split(';') {
        let words: Vec<_> = words(part);
        match part.trim_start().split_once("use ") {
            Some((_, path)) if !path.starts_with("crate") && !path.starts_with("std") => {
                let mut names = words.iter().skip_while(|word| **word != "use").skip(1);
                let Some(module) = names.next() else { continue };
                exports.extend(names.map(|name| ((*name).to_owned(), (*module).to_owned())));
            }
            _ => {
                if let [.., "mod", module] = words[..] {
                    graph.insert(module.to_owned(), HashSet::new());
                }
            }
        }
    }
    for path in sources(&src().join(layer)) {
        let relative = path.strip_prefix(src().join(layer)).expect("below the layer").to_owned();
        let module = relative.iter().next().expect("a name").to_string_lossy().replace(".rs", "");
        // Its unit tests, the last of a file, may import anything.
        let lines: Vec<_> = code(&path).into_iter().take_while(|line| line != "#[cfg(test)]").collect();
        let mut named = paths(&lines, &format!("crate::{layer}::"));
        if relative.components().count() == 1 {
            named.extend(paths(&lines, "super::"));
        }
        let imported = named.into_iter().map(|name| exports.get(&name).cloned().unwrap_or(name));
        let imported: Vec<_> = imported.filter(|name| *name != module && graph.contains_key(name)).collect();
        if let Some(known) = graph.get_mut(&module) {
            known.extend(imported);
        }
    }
    graph
}

fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect()
}

/// The names that directly follow `prefix`, or stand in the group that follows it.
fn paths(lines: &[String], prefix: &str) -> Vec<String> {
    let text = lines.join("\n");
    let mut found = Vec::new();
    for (at, _) in text.match_indices(prefix) {
        if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == ':') {
            continue;
        }
        let rest = &text[at + prefix.len()..];
        let group =
            if rest.starts_with('{') { rest.split("};").next() } else { words(rest).first().copied() };
        found.extend(words(group.unwrap_or("")).into_iter().map(str::to_owned));
    }
    found
}

/// The modules of a layer that import each other, or import some that do.
fn in_cycles(layer: &str) -> (BTreeSet<String>, usize) {
    let mut graph = modules(layer);
    let edges = graph.values().map(HashSet::len).sum();
    loop {
        // A module that imports nothing of the rest, or that nothing of the rest imports, is no part of a cycle.
        let used: HashSet<String> = graph.values().flatten().cloned().collect();
        let is_end = |(name, uses): &(&String, &HashSet<String>)| uses.is_empty() || !used.contains(*name);
        let Some(end) = graph.iter().find(is_end).map(|(name, _)| name.clone()) else { break };
        graph.remove(&end);
        for uses in graph.values_mut() {
            uses.remove(&end);
        }
    }
    (graph.into_keys().collect(), edges)
}

#[test]
fn no_modules_of_a_layer_import_each_other() {
    /// A backend makes regions, a region knows its backend, and both know devices and the streams that use memory.
    const OF_MEMORY: [&str; 5] = ["backend", "borrowed", "cuda", "region", "stream_set"];
    let mut all = 0;
    for layer in LAYERS {
        let (found, edges) = in_cycles(layer);
        let known = if layer == "memory" { &OF_MEMORY[..] } else { &[] };
        assert!(found.iter().eq(known), "modules of {layer} import each other: {found:?}");
        all += edges;
    }
    assert!(all > 150, "{all}");
}

#[test]
fn only_layers_have_a_file_called_mod() {
    for path in sources(&src()) {
        let depth = path.strip_prefix(src()).expect("below src").components().count();
        assert!(!path.ends_with("mod.rs") || depth == 2, "{} is not the root of a layer", path.display());
    }
}
