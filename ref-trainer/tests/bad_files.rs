//! Files that are torn, foreign or spoilt: exit 3, one sentence, and nothing half-loaded or
//! half-written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use quintet_ref_trainer::failure::{Exit, Failure};
use quintet_ref_trainer::model_config::Model;
use quintet_ref_trainer::weights::names::{self, Experts};
use quintet_ref_trainer::weights::{self, Tensors};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Type, shape and bytes by name.
type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A folder of its own for each test, gone with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quintet-bad-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn fixture(name: &str, file: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside_oracle");
    std::fs::read(root.join(name).join(file)).unwrap()
}

fn model(name: &str) -> Model {
    let text = String::from_utf8(fixture(name, "config.json")).unwrap();
    Model::from_json(name, &text).unwrap()
}

/// One sentence with exit 3, and all of `words` in it.
#[track_caller]
fn refused(what: &str, failure: Failure, words: &[&str]) {
    assert_eq!(failure.exit, Exit::Data, "{what}: {failure}");
    let s = &failure.sentence;
    assert!(!s.is_empty() && !s.contains('\n'), "{what}: {s}");
    for word in words {
        assert!(s.contains(word), "{what}: {s}");
    }
}

/// A file of these tensors.
fn file(tensors: &Stored) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// The tensors of a fixture.
fn tensors(name: &str) -> Stored {
    stored(&fixture(name, "model.safetensors"))
}

/// The tensors of a file.
fn stored(bytes: &[u8]) -> Stored {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let all = file.iter();
    all.map(|(n, t)| {
        (
            n.to_string(),
            (t.dtype(), t.shape().to_vec(), t.data().to_vec()),
        )
    })
    .collect()
}

/// Theirs with every expert in one tensor, as models of transformers 5 hold them.
fn fused(name: &str) -> Stored {
    let (config, mut all) = (model(name).config, tensors(name));
    all.retain(|name, _| !name.contains(".experts."));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside_oracle");
    let ours = weights::read(&folder.join(name), &config).unwrap();
    for (name, shape) in quintet_ref_trainer::oracle::param_shapes(&config) {
        if !name.contains(".experts.") {
            continue;
        }
        let stored = names::stored(&config, &name, Experts::Fused).remove(0);
        let theirs = stored.shape(&shape);
        let len = 4 * theirs.iter().product::<usize>();
        let entry = all.entry(stored.name.clone());
        let (_, _, bytes) = entry.or_insert_with(|| (Dtype::F32, theirs, vec![0; len]));
        for (index, value) in ours[&name].iter().enumerate() {
            let at = 4 * stored.at(&shape, index);
            bytes[at..at + 4].copy_from_slice(&(*value as f32).to_le_bytes());
        }
    }
    all
}

#[test]
fn experts_may_lie_fused_or_alone_but_not_both() {
    let dir = Folder::new("fused");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside_oracle");
    for name in ["mixtral", "qwen3-moe", "glm4-moe"] {
        let config = model(name).config;
        let alone: Tensors = weights::read(&root.join(name), &config).unwrap();
        let all = fused(name);
        assert!(all.keys().any(|n| n.ends_with("experts.gate_up_proj")));
        dir.put("model.safetensors", &file(&all));
        assert_eq!(weights::read(&dir.0, &config).unwrap(), alone, "{name}");
        // Half of them in one file, half in another.
        let (mut one, mut other) = (all.clone(), all.clone());
        one.retain(|name, _| name.len() % 2 == 0);
        other.retain(|name, _| name.len() % 2 == 1);
        dir.put("model.safetensors", &file(&one));
        dir.put("more.safetensors", &file(&other));
        assert_eq!(weights::read(&dir.0, &config).unwrap(), alone, "{name}");
        // Down alone, gate and up fused.
        let mut mixed = all.clone();
        mixed.retain(|name, _| !name.ends_with("experts.down_proj"));
        let down = |name: &str| name.contains(".w2.") || name.contains("down_proj");
        let mut each = tensors(name);
        each.retain(|name, _| name.contains(".experts."));
        mixed.extend(each.clone().into_iter().filter(|(n, _)| down(n)));
        dir.put("model.safetensors", &file(&mixed));
        std::fs::remove_file(dir.0.join("more.safetensors")).unwrap();
        assert_eq!(weights::read(&dir.0, &config).unwrap(), alone, "{name}");
        // Both.
        let mut both = all;
        both.extend(each);
        dir.put("model.safetensors", &file(&both));
        refused(
            name,
            weights::read(&dir.0, &config).unwrap_err(),
            &["are the same and both"],
        );
    }
}

/// Every way to spoil the file of one model.
fn spoilt(good: &[u8]) -> Vec<(String, Vec<u8>)> {
    let len = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let (header, data) = (
        std::str::from_utf8(&good[8..8 + len]).unwrap(),
        &good[8 + len..],
    );
    let with = |header: &str, data: &[u8]| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    };
    let mut all: Vec<(String, Vec<u8>)> = Vec::new();
    // Cut at each border, and beside it.
    let keys: serde_json::Value = serde_json::from_str(header).unwrap();
    let ends = keys.as_object().unwrap().values();
    let ends = ends.filter_map(|t| t["data_offsets"][1].as_u64());
    let borders = (0..=16)
        .chain([8 + len])
        .chain(ends.map(|end| 8 + len + end as usize));
    for cut in borders.flat_map(|at| [at.saturating_sub(1), at, at + 1]) {
        if cut < good.len() {
            all.push((format!("cut at {cut}"), good[..cut].to_vec()));
        }
    }
    all.push(("one byte more".into(), [good, &[0]].concat()));
    for n in [
        0,
        1,
        len as u64 - 1,
        len as u64 + 1,
        good.len() as u64,
        100_000_001,
        1 << 63,
        u64::MAX - 7,
        u64::MAX,
    ] {
        let mut bytes = good.to_vec();
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        all.push((format!("header of {n} bytes"), bytes));
    }
    for garbage in [
        "",
        "{",
        "[]",
        "null",
        "{\"x\": 1}",
        "{\"x\": {}}",
        "\u{1}\u{2}\u{3}",
        &"[".repeat(5000),
    ] {
        all.push((format!("header {garbage:.9}"), with(garbage, data)));
    }
    let mut bytes = good.to_vec();
    bytes[8 + len / 2] = 0xFF;
    all.push(("header that is not UTF-8".into(), bytes));
    let swap = |from: &str, to: &str| {
        assert!(header.contains(from), "{from}");
        with(&header.replacen(from, to, 1), data)
    };
    for (from, to) in [
        // Types.
        ("\"F32\"", "\"I32\""),
        ("\"F32\"", "\"U32\""),
        ("\"F32\"", "\"F16\""),
        ("\"F32\"", "\"F99\""),
        // Shapes.
        ("[10,12]", "[12,10]"),
        ("[10,12]", "[120]"),
        ("[10,12]", "[10,12,1]"),
        ("[10,12]", "[10,13]"),
        ("[10,12]", "[4294967296,4294967296]"),
        ("[10,12]", "[-10,12]"),
        // Names.
        ("experts.5.w3", "experts.6.w3"),
        ("experts.5.w3", "experts.3.w3"),
        ("experts.5.w3", "experts.05.w3"),
        ("model.norm.weight", "model.norms.weight"),
        (
            "model.layers.1.self_attn.q_proj",
            "model.layers.7.self_attn.q_proj",
        ),
        // Places.
        ("\"data_offsets\":[0,", "\"data_offsets\":[4,"),
        (
            "\"data_offsets\":[0,",
            "\"data_offsets\":[18446744073709551615,",
        ),
    ] {
        all.push((format!("{to} for {from}"), swap(from, to)));
    }
    all
}

#[test]
fn a_spoilt_safetensors_file_is_one_sentence() {
    let (dir, config) = (Folder::new("spoilt"), model("mixtral").config);
    let good = fixture("mixtral", "model.safetensors");
    let mut count = 0;
    for (what, bytes) in spoilt(&good) {
        if bytes == good {
            continue;
        }
        dir.put("model.safetensors", &bytes);
        match weights::read(&dir.0, &config) {
            Err(failure) => refused(&what, failure, &[]),
            Ok(_) => panic!("{what} was read"),
        }
        count += 1;
    }
    assert!(count > 100, "{count}");
    // One tensor less, each in turn; one of another model more.
    let all = tensors("mixtral");
    for name in all.keys() {
        let mut less = all.clone();
        less.remove(name);
        dir.put("model.safetensors", &file(&less));
        let failure = weights::read(&dir.0, &config).unwrap_err();
        refused(name, failure, &["is in no safetensors file"]);
    }
    dir.put("model.safetensors", &good);
    assert!(weights::read(&dir.0, &config).is_ok());
    dir.put("second.safetensors", &good);
    refused(
        "twice",
        weights::read(&dir.0, &config).unwrap_err(),
        &["is there twice"],
    );
    dir.put("second.safetensors", &fixture("gpt2", "model.safetensors"));
    refused(
        "foreign",
        weights::read(&dir.0, &config).unwrap_err(),
        &["no parameter of the model"],
    );
}

/// The program itself, from the folder.
fn quintet(dir: &Folder, line: &str) -> Result<(), Failure> {
    let output = Command::new(env!("CARGO_BIN_EXE_quintet"))
        .args(line.split_whitespace())
        .current_dir(&dir.0)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(0) => return Ok(()),
        Some(3) => {}
        code => panic!("{line}: {code:?}: {said}"),
    }
    assert!(output.stdout.is_empty(), "{line}");
    let sentence = said
        .strip_prefix("quintet: ")
        .unwrap_or_else(|| panic!("{said}"));
    Err(Failure::data(sentence.strip_suffix('\n').unwrap()))
}

#[test]
fn the_program_leaves_nothing_of_a_spoilt_folder() {
    let dir = Folder::new("program");
    std::fs::create_dir_all(dir.0.join("m")).unwrap();
    // Its vocabulary is 30.
    dir.put("text", &b"\t\n\x0b\x1c\x01".repeat(60));
    dir.put("letters", &b"to be or not to be".repeat(20));
    let (config, good) = (
        fixture("glm4-moe", "config.json"),
        fixture("glm4-moe", "model.safetensors"),
    );
    let lines = [
        "convert m new",
        "eval --model m --data text --seq-length 8",
        "eval --model m --data text --seq-length 8 --dp 2 --tp 2 --ep 2",
    ];
    let text = String::from_utf8(config.clone()).unwrap();
    let foreign = text
        .replace("glm4_moe", "deepseek_v9")
        .replace("Glm4Moe", "DeepseekV9");
    let cases: [(&[u8], &[u8], &str); 8] = [
        (
            &config,
            &good[..good.len() / 2],
            "no whole safetensors file",
        ),
        (&config, &good[..7], "no whole safetensors file"),
        (&config, b"", "no whole safetensors file"),
        (
            &config,
            &fixture("qwen3-moe", "model.safetensors"),
            "model.safetensors",
        ),
        (&config[..config.len() / 2], &good, "not JSON"),
        (b"\xFF\xFE{}", &good, "config.json"),
        (b"[1, 2]", &good, "not a JSON object"),
        (foreign.as_bytes(), &good, "deepseek_v9"),
    ];
    for (config, weights, words) in cases {
        dir.put("m/config.json", config);
        dir.put("m/model.safetensors", weights);
        for line in lines {
            let failure = quintet(&dir, line).expect_err(line);
            refused(line, failure, &[words]);
            assert!(!dir.0.join("new").exists(), "{line} left a folder");
        }
    }
    std::fs::remove_file(dir.0.join("m/model.safetensors")).unwrap();
    dir.put("m/config.json", &config);
    for line in lines {
        refused(
            line,
            quintet(&dir, line).expect_err(line),
            &["holds no safetensors file"],
        );
    }
    refused(
        "none",
        quintet(&dir, "convert nowhere new").unwrap_err(),
        &["nowhere"],
    );
    // What is whole is taken, once; a checkpoint that is torn then is not.
    dir.put("m/model.safetensors", &good);
    for line in &lines[1..] {
        quintet(&dir, line).unwrap();
    }
    let line = lines[1].replace("text", "letters");
    refused(&line, quintet(&dir, &line).unwrap_err(), &["30"]);
    quintet(&dir, "convert m new").unwrap();
    refused(
        "again",
        quintet(&dir, "convert m new").unwrap_err(),
        &["there already"],
    );
    quintet(&dir, "convert new back").unwrap();
    let back = std::fs::read(dir.0.join("back/model.safetensors")).unwrap();
    assert_eq!(
        stored(&back),
        stored(&good),
        "a round trip has the same bits"
    );
    let folder = std::fs::read_to_string(dir.0.join("new/latest")).unwrap();
    let step = dir.0.join("new").join(folder.trim());
    let mut left = vec![step];
    let mut files = Vec::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        } else {
            files.push(path);
        }
    }
    assert!(files.len() > 1, "{files:?}");
    for path in files {
        // A conversion needs no moments, a run that goes on does.
        let line = if path.to_str().unwrap().contains("optim") {
            "train --load new --data text --seq-length 8 --mbs 1 --gbs 2 --steps 1 --quiet"
        } else {
            "convert new torn"
        };
        let whole = std::fs::read(&path).unwrap();
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            refused(
                &path.display().to_string(),
                quintet(&dir, line).expect_err(line),
                &[],
            );
            assert!(!dir.0.join("torn").exists());
        }
        std::fs::write(&path, &whole).unwrap();
    }
    quintet(&dir, "convert new torn").unwrap();
}
