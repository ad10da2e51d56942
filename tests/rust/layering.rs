//! Folders are layers: nothing imports from a later one, and `unsafe` stays where it belongs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The layers, lowest first, as `lib.rs` documents them.
const LAYERS: [&str; 11] = [
    "base", "layout", "index", "cache", "memory", "kernels", "tensor", "transfer", "pool", "engines",
    "python",
];

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

pub(crate) fn sources(folder: &Path) -> Vec<PathBuf> {
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

pub(crate) fn src() -> PathBuf {
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

/// A module: the names that it imports, each with its path, and its code without tests and imports.
struct Module {
    imported: HashMap<String, Vec<String>>,
    code: String,
}

impl Module {
    fn new(code: &str) -> Self {
        // Its unit tests, the last of a file, may import anything.
        let code = code.split("\n#[cfg(test)]").next().and_then(|code| code.split("\n#[cfg(all(test").next());
        let (mut imported, mut rest) = (HashMap::new(), String::new());
        for statement in code.expect("the first part").split_inclusive(';') {
            let begin = statement.lines().position(|line| {
                let line = line.trim_start();
                line.starts_with("use ") || line.starts_with("pub") && line.contains(" use ")
            });
            let lines: Vec<_> = statement.lines().collect();
            let (before, import) = lines.split_at(begin.unwrap_or(lines.len()));
            rest.push_str(&before.join("\n"));
            if let Some((_, tree)) = import.join(" ").trim_end_matches(';').split_once("use ") {
                add_imports(tree, &[], &mut imported);
            }
            rest.push('\n');
        }
        Self { imported, code: rest }
    }

    /// The code of a function of the module itself, not of a type.
    fn function(&self, name: &str) -> Option<String> {
        let begins = |line: &&str| {
            let rest = line.split_once("fn ").map(|(_, rest)| rest);
            !line.starts_with(' ') && rest.is_some_and(|rest| words(rest).first() == Some(&name))
        };
        let lines: Vec<_> = self.code.lines().skip_while(|line| !begins(line)).collect();
        let end = lines.iter().position(|line| line.starts_with('}') || line.ends_with('}'))?;
        Some(lines[..=end].join("\n"))
    }
}

/// Adds the names that the tree of a `use` imports, each with its path.
fn add_imports(tree: &str, prefix: &[String], found: &mut HashMap<String, Vec<String>>) {
    let (path, group) = tree.split_once('{').map_or((tree, None), |(path, group)| (path, Some(group)));
    let (path, alias) =
        path.split_once(" as ").map_or((path, None), |(path, alias)| (path, Some(alias.trim())));
    let mut whole = prefix.to_vec();
    whole.extend(words(path).into_iter().map(str::to_owned));
    let Some(group) = group else {
        if whole.last().is_some_and(|last| last == "self") {
            whole.pop();
        }
        if let Some(name) = alias.map(str::to_owned).or_else(|| whole.last().cloned()) {
            found.insert(name, whole);
        }
        return;
    };
    let (mut depth, mut begin) = (0, 0);
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                if !group[begin..at].trim().is_empty() {
                    add_imports(&group[begin..at], &whole, found);
                }
                begin = at + 1;
            }
            _ => (),
        }
    }
}

/// The paths of two names or more in some code.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("::") {
        let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        let first = code[..at].rsplit(|letter| !is_name(letter)).next().unwrap_or("");
        if first.is_empty() || code[..at - first.len()].ends_with("::") {
            continue;
        }
        let whole = code[at - first.len()..].split(|letter| !is_name(letter) && letter != ':').next();
        found.push(words(whole.unwrap_or("")).into_iter().map(str::to_owned).collect());
    }
    found
}

/// The modules of the crate by their paths; that of the crate itself is empty.
struct Modules(HashMap<Vec<String>, Module>);

impl Modules {
    fn of_crate() -> Self {
        let all = sources(&src()).into_iter().map(|source| {
            let relative = source.strip_prefix(src()).expect("below src").with_extension("");
            let names = relative.iter().map(|name| name.to_string_lossy().into_owned());
            let path = names.filter(|name| name != "mod" && name != "lib").collect();
            (path, Module::new(&code(&source).join("\n")))
        });
        Self(all.collect())
    }

    /// The module that has what `path` names in module `from`, and its name there; `None` for another crate. What
    /// a module imports it only passes on.
    fn find(&self, from: &[String], path: &[String], depth: usize) -> Option<(Vec<String>, Option<String>)> {
        let mut here = from.to_vec();
        let mut names = path.iter().peekable();
        let first = path.first()?;
        match first.as_str() {
            "crate" => {
                here.clear();
                names.next();
            }
            "self" => drop(names.next()),
            "super" => {
                while names.next_if(|name| *name == "super").is_some() {
                    here.pop();
                }
            }
            _ => {
                let inner = [from, std::slice::from_ref(first)].concat();
                if !self.0.contains_key(&inner) && !self.0[from].imported.contains_key(first) {
                    return None;
                }
            }
        }
        while let Some(name) = names.next() {
            let inner = [here.as_slice(), std::slice::from_ref(name)].concat();
            if self.0.contains_key(&inner) {
                here = inner;
                continue;
            }
            // An import of a name under the same name, as that of another crate, leads nowhere.
            return match self.0.get(&here)?.imported.get(name) {
                Some(target) if depth < 8 => {
                    let rest = names.cloned().collect::<Vec<_>>();
                    self.find(&here, &[target.as_slice(), &rest].concat(), depth + 1)
                }
                Some(_) => None,
                None => Some((here, Some(name.clone()))),
            };
        }
        Some((here, None))
    }

    /// The modules that module `from` needs for `named` paths. A function of a module above stands for what it
    /// needs itself, so that no circle leads through it.
    fn needed(&self, from: &[String], named: Vec<Vec<String>>) -> HashSet<Vec<String>> {
        let mut found = HashSet::new();
        let mut seen = HashSet::new();
        let mut open: Vec<_> = named.into_iter().map(|path| (from.to_vec(), path)).collect();
        while let Some((at, path)) = open.pop() {
            let Some((module, item)) = self.find(&at, &path, 0) else { continue };
            found.insert(module.clone());
            if !from.starts_with(&module) || !seen.insert((module.clone(), item.clone())) {
                continue;
            }
            if let Some(body) = item.and_then(|item| self.0[&module].function(&item)) {
                open.extend(self.named(&module, &body).into_iter().map(|path| (module.clone(), path)));
            }
        }
        found.remove(from);
        found
    }

    /// The paths in some code of a module, and the names that it has from elsewhere or from its functions.
    fn named(&self, module: &[String], code: &str) -> Vec<Vec<String>> {
        let own = |name: &&str| {
            let module = &self.0[module];
            module.imported.contains_key(*name) || module.function(name).is_some()
        };
        let single = words(code).into_iter().filter(own).map(|name| vec!["self".to_owned(), name.to_owned()]);
        paths(code).into_iter().chain(single).collect()
    }

    /// For each folder, its modules with those of the folder that they need. The folder's own file is none of
    /// them: it has the type whose methods they are, or passes their names on.
    fn by_folder(&self) -> HashMap<Vec<String>, HashMap<String, HashSet<String>>> {
        let mut folders: HashMap<_, HashMap<_, HashSet<_>>> = HashMap::new();
        for (from, module) in &self.0 {
            let mut named = paths(&module.code);
            named.extend(module.imported.values().cloned());
            for to in self.needed(from, named) {
                let shared = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
                if let (Some(user), Some(used)) = (from.get(shared), to.get(shared)) {
                    let folder = folders.entry(from[..shared].to_vec()).or_default();
                    folder.entry(user.clone()).or_default().insert(used.clone());
                    folder.entry(used.clone()).or_default();
                }
            }
        }
        folders
    }
}

pub(crate) fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect()
}

/// The modules that import each other, or import some that do and are imported by some that do.
fn in_circles(mut graph: HashMap<String, HashSet<String>>) -> BTreeSet<String> {
    loop {
        // A module that imports nothing of the rest, or that nothing of the rest imports, is in no circle.
        let used: HashSet<String> = graph.values().flatten().cloned().collect();
        let is_end = |(name, uses): &(&String, &HashSet<String>)| uses.is_empty() || !used.contains(*name);
        let Some(end) = graph.iter().find(is_end).map(|(name, _)| name.clone()) else { break };
        graph.remove(&end);
        for uses in graph.values_mut() {
            uses.remove(&end);
        }
    }
    graph.into_keys().collect()
}

#[test]
fn no_modules_of_a_folder_import_each_other() {
    let folders = Modules::of_crate().by_folder();
    let imports =
        |folder: &HashMap<String, HashSet<String>>| folder.values().map(HashSet::len).sum::<usize>();
    let counts: HashMap<_, _> =
        folders.iter().map(|(path, folder)| (path.join("/"), imports(folder))).collect();
    for (path, folder) in folders {
        let found = in_circles(folder);
        assert!(found.is_empty(), "modules of src/{} import each other: {found:?}", path.join("/"));
    }
    // Fewer would mean that some are not found.
    for (folder, least) in [("", 30), ("pool", 40), ("pool/prefix_cache", 40), ("memory/cuda", 12)] {
        assert!(counts[folder] >= least, "src/{folder}: {}", counts[folder]);
    }
}

#[test]
fn circles_are_found_at_every_depth_and_behind_what_passes_names_on() {
    let is_circle = |sources: &[(&str, &str)]| {
        let module = |(path, code): &(&str, &str)| {
            (words(path).into_iter().map(str::to_owned).collect(), Module::new(&without_comments(code)))
        };
        let folders = Modules(sources.iter().map(module).collect()).by_folder();
        folders.into_values().any(|folder| !in_circles(folder).is_empty())
    };
    let outer =
        [("", "mod pool;"), ("pool", "mod cache;\npub use cache::{\n    Lease,\n    Load as Begun,\n};")];
    let (cache, lease) =
        ("mod lease;\nmod load;\n\npub use lease::Lease;\npub use load::Load;\n", "use super::load::Load;");
    let with = |load: &'static str| {
        is_circle(
            &[&outer[..], &[("pool/cache", cache), ("pool/cache/lease", lease), ("pool/cache/load", load)]]
                .concat(),
        )
    };
    assert!(!with("use std::sync::Weak;\nuse crate::pool::Begun;\nstruct Load;"));
    assert!(!with("// super::lease::Lease\n\n#[cfg(test)]\nmod tests {\n    use super::super::lease;\n}"));
    for load in [
        "use super::lease::Lease;",
        "use super::Lease;",
        "use crate::pool::cache::lease;",
        "use crate::{\n    base::Page,\n    pool::{Begun, Lease as Other},\n};",
        "fn f() {\n    super::lease::f();\n}",
        "fn f() {\n    let _ = crate::pool::Lease::new;\n}",
        "fn f() {\n    use super::Lease;\n}",
    ] {
        assert!(with(load), "{load}");
    }
    // Through a function of the folder's own file.
    let cache = "mod lease;\nmod load;\n\nuse lease::Lease;\n\nfn first() {\n    second();\n}\n\nfn second() {\n    Lease::new();\n}\n";
    let own = |load: &'static str| {
        is_circle(
            &[&outer[..], &[("pool/cache", cache), ("pool/cache/lease", lease), ("pool/cache/load", load)]]
                .concat(),
        )
    };
    assert!(
        own("use super::first;") && own("fn f() {\n    super::second();\n}") && !own("use super::third;")
    );
}

#[test]
fn only_layers_have_a_file_called_mod() {
    for path in sources(&src()) {
        let depth = path.strip_prefix(src()).expect("below src").components().count();
        assert!(!path.ends_with("mod.rs") || depth == 2, "{} is not the root of a layer", path.display());
    }
}
