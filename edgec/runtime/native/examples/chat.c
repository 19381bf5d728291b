/* chat FOLDER PROMPT: stream an answer. Everything that an app does, in its simplest form. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edgec.h"

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, edgec_last_error());
  return 1;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: %s FOLDER PROMPT\n", argv[0]);
    return 2;
  }
  if (edgec_abi_version() != EDGEC_ABI_VERSION) {
    fprintf(stderr, "this program was compiled for another version of the library\n");
    return 2;
  }

  edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT;
  edgec_engine* engine = NULL;
  if (edgec_engine_create(argv[1], &options, &engine) != EDGEC_OK) return fail("open");

  const size_t bytes = strlen(argv[2]);
  int32_t capacity = (int32_t)bytes + 1, count = 0; /* a token has at least one byte */
  int32_t* tokens = malloc(sizeof(int32_t) * (size_t)capacity);
  int32_t rc = 1;
  if (tokens == NULL) goto done;
  if (edgec_tokenizer_encode(edgec_engine_tokenizer(engine), argv[2], bytes, 0, tokens, capacity, &count) != EDGEC_OK) {
    rc = fail("encode");
    goto done;
  }

  edgec_request request;
  memset(&request, 0, sizeof(request));
  request.struct_size = sizeof(request);
  request.tokens = tokens;
  request.token_count = count;
  const edgec_sampling sampling = EDGEC_SAMPLING_INIT;
  request.sampling = sampling;
  request.sampling.temperature = 0.0f;
  request.sampling.max_tokens = 64;
  uint64_t id = 0;
  if (edgec_engine_submit(engine, &request, &id) != EDGEC_OK) {
    rc = fail("submit");
    goto done;
  }

  for (int finished = 0; !finished;) {
    int32_t outcome = 0, got = 0;
    if (edgec_engine_step(engine, &outcome) != EDGEC_OK) {
      rc = fail("step");
      goto done;
    }
    edgec_event events[16];
    do {
      if (edgec_engine_poll(engine, events, 16, &got) != EDGEC_OK) {
        rc = fail("poll");
        goto done;
      }
      for (int32_t i = 0; i < got; ++i) {
        fwrite(events[i].text, 1, (size_t)events[i].text_bytes, stdout);
        fflush(stdout);
        if (events[i].kind == EDGEC_EVENT_FINISH) finished = 1;
      }
    } while (got == 16);
  }
  printf("\n");
  rc = 0;

done:
  free(tokens);
  edgec_engine_destroy(engine);
  return rc;
}
